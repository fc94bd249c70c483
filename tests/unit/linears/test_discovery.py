"""From Megatron's model to placements: names, shapes, kinds, order."""

import copy
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules

from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import get_format
from megatron_snip.linears.discovery import (
    current_topology,
    find_linears,
    global_linears,
    own_linears,
    stage_layers,
)
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te.job import file_rules, rule_of
from megatron_snip.log import forget_warnings
from megatron_snip.options import Option
from megatron_snip.planning.fixed import Source
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Axis, Placement, Topology
from tests.models import EXPERTS, recipe_file
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


def test_which_layers_each_chunk_holds_and_under_which_numbers(make_model: MakeModel) -> None:
    """Of stage 1 of 3, interleaved; the last chunk has a layer without linears in front."""
    chunks = [make_model(), make_model(num_layers=3)]
    numbers = ((3, 4), (8, 9, 10))
    for chunk, own in zip(chunks, numbers, strict=True):
        for layer, number in zip(chunk.decoder.layers, own, strict=True):
            layer.layer_number = number
    bare = torch.nn.Module()
    bare.layer_number = 8
    chunks[1].decoder.layers[0] = bare
    chunks[1].mtp = torch.nn.Module()
    chunks[1].mtp.layers = make_model(num_layers=1).decoder.layers
    topology = Topology(stage=1, num_stages=3)
    placements = [p for _, (p,) in find_linears(chunks, topology)]
    found = stage_layers(
        global_linears([own_linears(placements)]), topology.num_stages, len(chunks)
    )
    assert found is not None
    first = {"decoder.layers.2": 0, "decoder.layers.3": 1}
    second = {"decoder.layers.8": 1, "decoder.layers.9": 2, "mtp.layers.0": 0}
    empty = ({}, {})
    assert found.root == (empty, (first, second), empty)
    # Two blocks of one name: no number tells their layers apart.
    blocks = torch.nn.ModuleDict({name: make_model() for name in ("a", "b")})
    for layer in blocks["b"].decoder.layers:
        layer.layer_number += 2
    placements = [p for _, (p,) in find_linears([blocks], Topology())]
    assert stage_layers(global_linears([own_linears(placements)]), 1, 1) is None


@pytest.mark.parametrize(("at_end", "kept"), [(1, [0, 3]), (2, [0, 2, 3]), (9, [0, 1, 2, 3])])
def test_the_layers_that_a_job_keeps_in_bf16_are_fixed(
    make_model: MakeModel, at_end: int, kept: list[int]
) -> None:
    """Of every block, each with its own settings: a T5 has two, and a BERT has an encoder only."""
    blocks = torch.nn.ModuleDict()
    for block in ("encoder", "mtp"):
        blocks[block] = make_model(num_layers=4).decoder
    linears = [(module, each.name) for module, (each,) in find_linears([blocks], Topology())]
    assert not any(rule_of(module, name) for module, name in linears)
    for block in blocks.values():
        block.config.first_last_layers_bf16 = True
        block.config.num_layers_at_start_in_bf16 = 1
        block.config.num_layers_at_end_in_bf16 = at_end
    found = {name: rule for module, name in linears if (rule := rule_of(module, name))}
    wanted = {f"encoder.layers.{layer}.{name}" for layer in kept for name in IN_LAYER}
    assert found == dict.fromkeys(wanted, Source.EDGE)


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
    rows = global_linears([own_linears(placements)])
    assert len(rows) == 2 * 4
    (fc2,) = (row for row in rows if row.name == "decoder.layers.0.mlp.experts.linear_fc2")
    assert fc2.flops_per_token == 2 * 6 * fc2.in_features * fc2.out_features


def test_a_repeated_layer_of_multi_token_prediction_counts_once_for_each_depth(
    make_model: MakeModel,
) -> None:
    blocks = torch.nn.ModuleDict({block: make_model().decoder for block in ("decoder", "mtp")})
    for block in blocks.values():
        block.config.mtp_use_repeated_layer = True
        block.config.mtp_num_layers = 3
    for _, (place,) in find_linears([blocks], Topology()):
        calls = 3 if place.name.startswith("mtp.") else 1
        assert (place.num_calls, place.info.calls_per_token) == (calls, calls)
        assert place.info.flops_per_token == calls * 6 * place.in_features * place.out_features


def test_rows_follow_the_data_s_flow(make_model: MakeModel) -> None:
    placements = [p for _, (p,) in find_linears([make_model()], Topology())]
    wanted = [f"decoder.layers.{i}.{name}" for i in range(2) for name in IN_LAYER]
    assert [row.name for row in global_linears([own_linears(placements)])] == wanted
    assert [row.name for row in global_linears([own_linears(placements[::-1])])] == wanted
    names = [f"decoder.layers.{i}.mlp.linear_fc1" for i in (10, 2)]
    placements = [Placement(name, 0, "column", 4, 4) for name in names]
    assert [row.name for row in global_linears([own_linears(placements)])] == names[::-1]


def test_a_linear_that_is_claimed_twice_is_refused() -> None:
    one = Placement("decoder.layers.0.mlp.linear_fc1", 0, "column", 4, 4)
    other = Placement("decoder.layers.0.mlp.linear_fc1", 1, "column", 4, 4)
    with pytest.raises(UnsupportedError, match="ranks disagree about decoder"):
        global_linears([own_linears([one, other])])


def vision_language_model(make_model: MakeModel, vision_size: int, **changes: Any) -> LLaVAModel:
    """Megatron's own, of two layers each: `vision_model.decoder`, `language_model.decoder`."""
    config = make_model(normalization="LayerNorm", hidden_dropout=0.0, **changes).config
    vision = copy.deepcopy(config)
    vision.hidden_size, vision.kv_channels = vision_size, vision_size // 2
    vision.vision_model_type = "internvit"
    return LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
        language_vocab_size=32,
        language_max_sequence_length=16,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=config,
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear),
        vision_projection_type="affine",
        img_h=8,
        img_w=8,
        patch_dim=4,
    )


def test_rules_of_a_precision_file_decide_where_megatron_has_applied_them(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It matches the names within its GPT model, and gives a vision encoder or a T5 nothing.

    Its own linears stand for Transformer Engine's, which take what a rule gives them.
    """

    def finish_init(self: Any, quantization_config: Any) -> None:
        self.te_quant_params = quantization_config

    for kind in (ColumnParallelLinear, RowParallelLinear):
        monkeypatch.setattr(kind, "finish_init", finish_init, raising=False)
    rules = {
        "language_model.decoder.*": False,
        "vision_model.*": False,
        "decoder.layers.0.*fc1": True,
        "decoder.layers.0.mlp.*": True,
        "decoder.layers.0.mlp.linear_fc2": False,  # the rule before it decides
        "encoder.*": False,
    }
    file = recipe_file(dict.fromkeys(rules, "bf16"))
    wanted = {f"{pattern} (bf16)": decides for pattern, decides in rules.items()}
    model = vision_language_model(make_model, 64, quant_recipe=file)
    assert file_rules([model]) == wanted
    wrapped = torch.nn.Module()
    wrapped.module = model.language_model
    assert file_rules([wrapped]) == wanted
    # Megatron does not call a linear whose operations are fused.
    fused = {id(module) for module in model.modules()}
    assert file_rules([model], fused) == dict.fromkeys(wanted, False)

    config = model.language_model.config
    specs = encoder_model_with_local_spec(), decoder_model_with_local_spec()
    t5 = T5Model(config, config, *specs, vocab_size=32, max_sequence_length=16)
    assert file_rules([t5]) == dict.fromkeys(wanted, False)


@pytest.mark.parametrize("vision_size", [64, 32])
def test_a_vision_encoder_is_not_taken_for_the_language_model(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture, vision_size: int
) -> None:
    """Of the same size its linears have the same names and shapes; other tokens run there."""
    forget_warnings()
    built = vision_language_model(make_model, vision_size)
    images, ids = torch.randn(2, 3, 8, 8), torch.arange(20).view(2, 10)
    inputs = {"images": images, "input_ids": ids, "attention_mask": None}
    inputs |= {"position_ids": torch.arange(10).expand(2, 10), "loss_mask": torch.ones(2, 10)}
    inputs |= {"labels": ids.clone()}
    ids[:, 3] = -200  # where the image is

    def loss() -> torch.Tensor:
        output, mask = built(**inputs)
        return (output * mask).sum()

    wanted = loss()
    wrapped: Any = torch.nn.Sequential(built)
    wrapped.config = built.language_model.config
    model = PlannedModel([wrapped], Topology(), seed=0)
    model.install()
    own = set(built.language_model.modules())
    assert len(model.linears) == 8 and all(linear.module in own for linear in model.linears)
    assert [r.getMessage() for r in caplog.records if "beside" in r.getMessage()] == [
        "layers beside the language model keep the run's precision: "
        "0.vision_model.decoder.layers (2 layers)"
    ]
    observer = StepObserver(MeasureSettings({"fp8": get_format("fp8")}, 1, 0), Topology())
    with model.runtime.observed_by(observer):
        measured = loss()
        measured.backward()
    table, _ = observer.table(model.job.linears, 1.0, None)
    assert measured == wanted
    # Five tokens of the image, a class token and four patches, replace one of ten.
    assert {(row.microbatches, row.tokens) for row in table.linears} == {(1, 2 * 14)}
    model.apply({info.name: Option.uniform("fp8") for info in model.job.linears})
    assert loss() != wanted


def test_a_teacher_within_the_student_is_not_planned(make_model: MakeModel) -> None:
    student = make_model()
    student._teacher_model = make_model()  # so distillation holds it
    found = find_linears([student], Topology())
    own = set(student.decoder.modules())
    assert len(found) == 8 and all(module in own for module, _ in found)


def test_two_linears_of_one_name_are_refused(make_model: MakeModel) -> None:
    side_by_side = torch.nn.ModuleList([make_model(), make_model()])
    with pytest.raises(UnsupportedError, match=r"^2 linears of this rank are named decoder"):
        find_linears([side_by_side], Topology())


def test_shards_that_cut_tiles_are_warned_of_once(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    two = Topology(tp=Axis(0, 2))
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
