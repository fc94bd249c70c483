"""From Megatron's model to placements: names, shapes, kinds, order."""

import pytest
import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.discovery import current_topology, find_linears, global_linears
from megatron_snip.log import forget_warnings
from megatron_snip.topology import Axis, Placement, Topology
from tests.te.models import EXPERTS
from tests.unit.linears.conftest import MakeModel
from tests.unit.planning.build import MODULES as IN_LAYER


def test_without_megatron_s_groups_there_is_no_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(UnsupportedError, match="parallel state is not initialized"):
        current_topology()


@pytest.mark.parametrize("gated", [True, False])
def test_linears_of_the_layers_and_no_others(make_model: MakeModel, gated: bool) -> None:
    model = make_model(
        num_query_groups=1,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
    )
    chunks = 2 if gated else 1
    wrapped = torch.nn.Sequential(torch.nn.Sequential(model))  # wrappers do not show in names
    found = {p.name: (m, p) for m, (p,) in find_linears([wrapped], Topology())}
    assert set(found) == {f"decoder.layers.{i}.{name}" for i in range(2) for name in IN_LAYER}
    shapes = {name: tuple(module.weight.shape) for name, (module, _) in found.items()}
    for name, (_, placement) in found.items():
        assert shapes[name] == (placement.out_features, placement.in_features)
        assert placement.kind == ("row" if name.endswith(("proj", "fc2")) else "column")
        assert placement.num_chunks == (chunks if name.endswith("fc1") else 1)
    assert shapes["decoder.layers.0.self_attention.linear_qkv"] == (64 + 2 * 32, 64)
    assert shapes["decoder.layers.1.mlp.linear_fc1"] == (chunks * 96, 64)


def test_layers_have_global_numbers(make_model: MakeModel) -> None:
    """A pipeline stage's `layers.0` may be the model's layer 5: `layer_number` says so."""
    model = make_model()
    for offset, layer in enumerate(model.decoder.layers):
        layer.layer_number = 6 + offset
    names = {p.name for _, (p,) in find_linears([model], Topology(stage=2))}
    assert names == {f"decoder.layers.{i}.{name}" for i in (5, 6) for name in IN_LAYER}
    assert {p.stage for _, (p,) in find_linears([model], Topology(stage=2))} == {2}


def test_experts_share_a_row(make_model: MakeModel) -> None:
    placements = [p for _, (p,) in find_linears([make_model(**EXPERTS)], Topology())]
    experts = [p for p in placements if p.expert is not None]
    assert {p.name for p in experts} == {
        f"decoder.layers.{i}.mlp.experts.linear_fc{j}" for i in range(2) for j in (1, 2)
    }
    fc1 = [p for p in experts if p.name == "decoder.layers.1.mlp.experts.linear_fc1"]
    assert [p.expert for p in fc1] == [0, 1, 2, 3]
    assert len({p.instance for p in experts}) == len(experts)
    assert all(p.num_active == 2.0 and p.num_chunks in (1, 2) for p in experts)
    rows = global_linears(placements, Topology())
    assert len(rows) == 2 * 4
    (fc2,) = (row for row in rows if row.name == "decoder.layers.0.mlp.experts.linear_fc2")
    assert fc2.flops_per_token == 2 * 6 * fc2.in_features * fc2.out_features


def test_rows_follow_the_data_s_flow(make_model: MakeModel) -> None:
    placements = [p for _, (p,) in find_linears([make_model()], Topology())]
    wanted = [f"decoder.layers.{i}.{name}" for i in range(2) for name in IN_LAYER]
    assert [row.name for row in global_linears(placements, Topology())] == wanted
    assert [row.name for row in global_linears(placements[::-1], Topology())] == wanted
    names = [f"decoder.layers.{i}.mlp.linear_fc1" for i in (10, 2)]
    placements = [Placement(name, 0, "column", 4, 4) for name in names]
    assert [row.name for row in global_linears(placements, Topology())] == names[::-1]


def test_a_linear_that_is_claimed_twice_is_refused() -> None:
    one = Placement("decoder.layers.0.mlp.linear_fc1", 0, "column", 4, 4)
    other = Placement("decoder.layers.0.mlp.linear_fc1", 1, "column", 4, 4)
    with pytest.raises(UnsupportedError, match="ranks disagree about decoder"):
        global_linears([one, other], Topology())


def test_shards_that_cut_tiles_are_warned_of_once(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    two = Topology(tensor=Axis(0, 2))
    forget_warnings()
    find_linears([make_model(hidden_size=128, ffn_hidden_size=128)], two)
    odd = make_model(hidden_size=128, ffn_hidden_size=192)  # fc1 is [192; 192] of 384
    find_linears([odd], Topology())  # with one rank there is nothing to differ from
    assert caplog.records == []
    for _ in range(2):
        find_linears([odd], two)
    # One a kind, whatever the number of layers.
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "shard (192, 128) of linear_fc1 is not a multiple of 128",
        "shard (128, 192) of linear_fc2 is not a multiple of 128",
    ]
