"""All linears of a model together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import get_format
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.runtime import MicrobatchTokens
from megatron_snip.options import BF16, Option
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Topology
from tests.models import losses
from tests.unit.linears.conftest import MakeModel
from tests.unit.planning.build import plan_of

FP8 = Option.uniform("fp8")


def overridden(model: PlannedModel) -> list[bool]:
    return ["_forward_impl" in linear.module.__dict__ for linear in model.linears]


def test_installing_applying_and_removing(make_model: MakeModel) -> None:
    built = make_model()
    state = list(built.state_dict())
    model = PlannedModel([built], Topology(), seed=3)
    assert len(model.linears) == len(model.job.linears) == 8
    assert overridden(model) == [False] * 8
    model.install()
    model.install()
    assert overridden(model) == [True] * 8 and list(built.state_dict()) == state
    plan = {info.name: FP8 if "fc1" in info.name else BF16 for info in model.job.linears}
    model.apply(plan)
    assert {p.name for p in model.linears if p.option == FP8} == {
        name for name, option in plan.items() if option == FP8
    }
    with pytest.raises(KeyError):
        model.apply(dict(list(plan.items())[1:]))
    model.uninstall()
    model.uninstall()
    assert overridden(model) == [False] * 8


def test_transformer_engine_cannot_run_megatron_s_own_linears(make_model: MakeModel) -> None:
    with pytest.raises(UnsupportedError, match="is Megatron's own; use --transformer-impl"):
        PlannedModel([make_model()], Topology(), seed=3, backend="te")


class Operations(TorchDispatchMode):
    """Keeps the name of every operation, those of the backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_iteration_that_is_not_observed_runs_megatron_s_operations(
    make_model: MakeModel,
) -> None:
    built = make_model(hidden_dropout=0.0)

    def operations() -> list[str]:
        with Operations() as mode:
            losses(built)
        return mode.names

    operations()  # fills Megatron's caches
    wanted = operations()
    model = PlannedModel([built], Topology(), seed=0)
    model.install()
    assert operations() == wanted
    observer = StepObserver(MeasureSettings({"fp8": get_format("fp8")}, 1, 0), Topology())
    with model.runtime.observed_by(observer):
        assert len(operations()) > 2 * len(wanted)
    assert operations() == wanted


def test_weights_are_the_trained_ones_of_the_names(make_model: MakeModel) -> None:
    model = PlannedModel([make_model()], Topology(), seed=0)
    frozen = model.linears[2]
    frozen.module.weight.requires_grad_(False)  # type: ignore[union-attr]
    places = [linear.placements[0] for linear in model.linears]
    assert list(model.weights()) == [place for place in places if place != frozen.placements[0]]
    name = model.linears[0].name
    assert [p.name for p in model.weights(frozenset({name}))] == [name]


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        PlannedModel([torch.nn.Linear(2, 2)], Topology(), seed=0)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_encoders_are_measured_and_run_their_plan(make_model: MakeModel, kind: str) -> None:
    config = make_model(hidden_dropout=0.0, normalization="LayerNorm").config
    size, blocks = {"vocab_size": 32, "max_sequence_length": 16}, ["encoder"]
    tokens, mask = torch.arange(32).view(2, 16), torch.ones(2, 16, dtype=torch.bool)
    if kind == "bert":
        built = BertModel(config, 0, bert_layer_local_spec, **size)
        inputs = (tokens, mask)
    else:
        specs = encoder_model_with_local_spec(), decoder_model_with_local_spec()
        built, blocks = T5Model(config, config, *specs, **size), ["encoder", "decoder"]
        seen = torch.zeros(2, 1, 16, 8, dtype=torch.bool)  # the decoder's sequence is shorter
        masks = seen[..., :1].mT | seen[..., :1], seen[:, :, :8], seen.mT
        inputs = (tokens, tokens[:, :8], *masks)

    def loss() -> torch.Tensor:
        output = built(*inputs)
        return (output[0] if kind == "bert" else output).float().square().sum()

    wanted = loss()
    decoder_tokens = 32 if kind == "bert" else 16
    model = PlannedModel([built], Topology(), 0, "auto", MicrobatchTokens(decoder_tokens, 32))
    read = {}
    for linear in model.linears:
        linear.module.register_forward_pre_hook(
            lambda module, inputs, name=linear.name: read.update({name: inputs[0][..., 0].numel()})
        )
    loss()
    assert read == {name: model.runtime.tokens.of_linear(name) for name in read}
    assert set(read.values()) == {decoder_tokens, 32}
    assert model.microbatch_tokens == (32 if kind == "bert" else None)
    model.install()
    assert {info.name.split(".")[0] for info in model.job.linears} == set(blocks)
    assert len(model.job.linears) == (8 if kind == "bert" else 8 + 14)
    observer = StepObserver(MeasureSettings({"fp8": get_format("fp8")}, 1, 0), Topology())
    with model.runtime.observed_by(observer):
        measured = loss()
        measured.backward()
    table, _ = observer.table(model.job.linears, 1.0, None)
    assert measured == wanted and all(row.microbatches == 1 for row in table.linears)
    assert all(row.formats["fp8"].input_error_square > 0 for row in table.linears)
    model.apply({info.name: FP8 for info in model.job.linears})
    assert loss() != wanted and loss().item() == pytest.approx(wanted.item(), rel=0.2)
    model.apply({info.name: BF16 for info in model.job.linears})
    assert loss() == wanted


class Stored(torch.Tensor):
    """As Transformer Engine's tensors that are stored quantized."""


def test_what_linears_resolved_to_follows_the_plan(make_model: MakeModel) -> None:
    model = PlannedModel([make_model()], Topology(), seed=0)
    names = [info.name for info in model.job.linears]
    plan = plan_of({name: "fp4" if name.endswith("fc1") else "bf16" for name in names})
    model.apply(plan.linears)
    model.linears.reverse()
    record = model.resolved(plan, 7)
    assert (record.iteration, record.plan_iteration, record.plan_digest) == (7, 0, plan.digest)
    assert [row.name for row in record.linears] == names
    for row in record.linears:
        expected = ("fp4", "simulated") if row.name.endswith("fc1") else ("bf16", "megatron")
        assert (row.option, row.recipe) == expected
        assert (row.backend, row.weight_storage) == ("simulate", "float32")
    other: Any = SimpleNamespace(name=names[0], option=BF16, recipe="mxfp8")
    weights = (torch.zeros(1), torch.zeros(1).as_subclass(Stored))
    other.backend, other.weights = "te", [SimpleNamespace(data=w, dtype=w.dtype) for w in weights]
    model = PlannedModel([make_model()], Topology(), seed=0)
    model.apply(plan.linears)
    model.linears.append(other)  # another rank's or expert's differs
    row = model.resolved(plan, 7).linears[0]
    assert (row.recipe, row.backend) == ("megatron / mxfp8", "simulate / te")
    assert row.weight_storage == "float32 / Stored"
