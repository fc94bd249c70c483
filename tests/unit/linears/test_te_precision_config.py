"""Precision files, as Megatron's own loader and matchers read them, in every layout."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron_snip.errors import UsageError
from megatron_snip.linears.te.precision_config import (
    Stages,
    config_text,
    evaluates_otherwise,
    export_configs,
    import_options,
    num_layers,
    stage_paths,
)
from megatron_snip.linears.te.recipe import FORMAT_OF_RECIPE, TERecipe, recipe_from_fields
from megatron_snip.options import Option

MODULES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
MIXED = Option.parse("nvfp4-mxfp8-bf16")
OPTIONS = (*map(Option.uniform, FORMAT_OF_RECIPE.values()), MIXED)
RECIPE_OF_FORMAT = {fmt: name for name, fmt in FORMAT_OF_RECIPE.items()}
RECIPES = {option: TERecipe(*(RECIPE_OF_FORMAT[f] for f in option.formats)) for option in OPTIONS}
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (2, 4)]
"""Pipeline stages and chunks a stage; eight layers."""


def mixed_plan(layers: int = 8, modules: tuple[str, ...] = MODULES) -> dict[str, Option]:
    names = [f"decoder.layers.{i}.{module}" for i in range(layers) for module in modules]
    return dict(zip(names, itertools.cycle((*OPTIONS, *OPTIONS[::-1], OPTIONS[1])), strict=False))


def megatron_names(stages: int, chunks: int, layers: int = 8) -> dict[str, tuple[int, str]]:
    """Global name -> (stage, name in the chunk), by Megatron's own offsets."""
    layer_module = pytest.importorskip("megatron.core.transformer.transformer_layer")
    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        standalone_embedding_stage=False,
        use_transformer_engine_op_fuser=False,
    )
    found = {}
    for stage, chunk in itertools.product(range(stages), range(chunks)):
        vp_stage = chunk if chunks > 1 else None
        if stages == 1 and chunks > 1:  # Megatron knows no interleaving of one stage
            offset = chunk * (layers // chunks)
        else:
            offset = layer_module.get_transformer_layer_offset(config, vp_stage, stage)
        for local in range(layers // (stages * chunks)):
            for module in MODULES:
                name = f"decoder.layers.{offset + local}.{module}"
                found[name] = (stage, f"decoder.layers.{local}.{module}")
    return found


@functools.cache
def loaded(path: Path) -> Any:
    from megatron.core.quantization.quant_config import RecipeConfig

    return RecipeConfig.from_yaml_file(str(path))


def as_megatron_reads(path: Path, name: str) -> TERecipe | None:
    """The recipe that Megatron would give the module `name`; None where no matcher matches."""
    from megatron.core.extensions.transformer_engine import TEQuantizationParams
    from megatron.core.quantization.utils import get_quant_config_or_none

    found = get_quant_config_or_none(name, loaded(path))
    if found is None:
        return None
    params = TEQuantizationParams.parse_from_config(found)
    assert params.evaluation_recipe is None
    fields = {name: value for name, value in vars(params.training_recipe).items() if value}
    for name in ("fp8_quantization_recipe", "fp4_quantization_recipe"):
        if name in fields:
            fields[name] = str(getattr(fields[name], "value", fields[name]))
    return recipe_from_fields(fields, "read")


def written(
    linears: Mapping[str, Option], stages: Stages, folder: Path
) -> tuple[list[dict[str, Any]], list[Path]]:
    configs = export_configs(linears, RECIPES, stages)
    paths = stage_paths(folder / "out.yaml", len(configs))
    for path, config in zip(paths, configs, strict=True):
        path.write_text(config_text(config, "a plan\nof two lines"))
    return configs, paths


@pytest.mark.parametrize(("stages", "chunks"), LAYOUTS)
def test_local_names_are_megatrons(stages: int, chunks: int) -> None:
    layout = Stages.even(8, stages, chunks)
    for name, (stage, local) in megatron_names(stages, chunks).items():
        assert layout.local(name) == (stage, local)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_megatron_gives_every_module_its_recipe(stages: int, tmp_path: Path) -> None:
    plan = mixed_plan()
    _, paths = written(plan, Stages.even(8, stages), tmp_path)
    assert len(paths) == stages
    for name, (stage, local) in megatron_names(stages, 1).items():
        assert as_megatron_reads(paths[stage], local) == RECIPES[plan[name]], name


@pytest.mark.parametrize("chunks", [2, 4])
def test_stages_that_agree_share_a_file(chunks: int, tmp_path: Path) -> None:
    """A plan by module alone is the same in every chunk."""
    plan = {name: OPTIONS[MODULES.index(name.split(".", 3)[3])] for name in mixed_plan()}
    _, (path,) = written(plan, Stages.even(8, 2, chunks // 2), tmp_path)
    for name, (_, local) in megatron_names(2, chunks // 2).items():
        assert as_megatron_reads(path, local) == RECIPES[plan[name]]


def test_two_chunks_of_a_stage_cannot_differ() -> None:
    plan = {f"decoder.layers.{i}.mlp.linear_fc1": OPTIONS[0] for i in range(4)}
    plan["decoder.layers.2.mlp.linear_fc1"] = OPTIONS[1]
    with pytest.raises(UsageError, match=r"layers\.2.*layers\.0.*both.*stage 0") as caught:
        export_configs(plan, RECIPES, Stages.even(4, 2, 2))
    assert "--snip-collect-only" in str(caught.value)
    # Options that differ in name alone do not differ.
    recipes = {OPTIONS[0]: RECIPES[OPTIONS[1]], OPTIONS[1]: RECIPES[OPTIONS[1]]}
    assert len(export_configs(plan, recipes, Stages.even(4, 2, 2))) == 1


def test_uneven_stages(tmp_path: Path) -> None:
    plan = mixed_plan(layers=5)
    _, paths = written(plan, Stages(2, (2, 3)), tmp_path)
    for name, option in plan.items():
        layer, module = int(name.split(".")[2]), name.split(".", 3)[3]
        stage, local = (0, layer) if layer < 2 else (1, layer - 2)
        read = as_megatron_reads(paths[stage], f"decoder.layers.{local}.{module}")
        assert read == RECIPES[option]


def test_the_first_layer_is_not_the_tenth(tmp_path: Path) -> None:
    plan = {f"decoder.layers.{i}.mlp.linear_fc1": OPTIONS[i == 1] for i in range(12)}
    _, (path,) = written(plan, Stages.even(12, 1), tmp_path)
    for name, option in plan.items():
        assert as_megatron_reads(path, name) == RECIPES[option]
    assert as_megatron_reads(path, "decoder.layers.1.mlp.linear_fc2") is None
    assert as_megatron_reads(path, "output_layer") is None


def test_experts_match_grouped_and_one_by_one(tmp_path: Path) -> None:
    plan = mixed_plan(2, EXPERTS)
    config, (path,) = written(plan, Stages.even(2, 1), tmp_path)
    for name, option in plan.items():
        head, tail = name.rsplit(".linear_", 1)
        for local in (name, f"{head}.local_experts.0.linear_{tail}"):
            assert as_megatron_reads(path, local) == RECIPES[option]
        last = f"{head}.local_experts.63.linear_{tail}"
        assert as_megatron_reads(path, last) == RECIPES[option]
    stages = Stages.even(2, 1)
    for sequential in (False, True):
        read = import_options(config[0], plan, stages, OPTIONS[0], "x", sequential)
        assert read == plan


def test_layers_of_another_block_are_on_the_last_stage(tmp_path: Path) -> None:
    mtp = "mtp.layers.0.transformer_layer.mlp.linear_fc1"
    plan = {**mixed_plan(4), mtp: MIXED}
    assert num_layers(plan) == 4
    stages = Stages.even(4, 2)
    assert stages.local(mtp) == (1, mtp)
    _, paths = written(plan, stages, tmp_path)
    assert as_megatron_reads(paths[0], mtp) is None
    assert as_megatron_reads(paths[1], mtp) == RECIPES[MIXED]


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (4, 1)])
def test_what_is_exported_is_imported(stages: int, chunks: int, tmp_path: Path) -> None:
    plan, layout = mixed_plan(), Stages.even(8, stages, chunks)
    _, paths = written(plan, layout, tmp_path)
    read: dict[str, Option] = {}
    for stage, path in enumerate(paths):
        own = [name for name in plan if layout.local(name)[0] == stage]
        config = yaml.safe_load(path.read_text())
        read |= import_options(config, own, layout, Option.uniform("bf16"), str(path))
    assert read == plan


def test_the_file_is_readable(tmp_path: Path) -> None:
    _, (path,) = written(mixed_plan(2), Stages.even(2, 1), tmp_path)
    lines = path.read_text().splitlines()
    assert lines[:2] == ["# a plan", "# of two lines"]
    assert lines[2].startswith("# Give the run a default low precision as well")
    matcher = next(line for line in lines if "layers.0.mlp.linear_fc1:" in line)
    assert "pattern: decoder.layers.0.mlp.linear_fc1" in matcher and "enabled: true" in matcher


def test_a_file_of_bf16_needs_no_advice(tmp_path: Path) -> None:
    plan = {"decoder.layers.0.mlp.linear_fc1": Option.uniform("bf16")}
    _, (path,) = written(plan, Stages.even(1, 1), tmp_path)
    assert "configs:" in path.read_text().splitlines()[2]


def a_file(*matchers: dict[str, Any], **configs: dict[str, Any]) -> dict[str, Any]:
    named = {
        name: {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe}
        for name, recipe in configs.items()
    }
    return {"configs": named, "matchers": {str(i): m for i, m in enumerate(matchers)}}


def glob(pattern: str, config: str, **changes: Any) -> dict[str, Any]:
    return {"type": "glob", "pattern": pattern, "config": config, "enabled": True, **changes}


MX = {"fp8_quantization_recipe": "mxfp8", "override_nonquantized_autocast": True}
NV = {"fp4_quantization_recipe": "nvfp4", "override_nonquantized_autocast": True}
NAMES = ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"]
ONE = Stages.even(1, 1)


def read(config: dict[str, Any], base: str = "bf16") -> list[str]:
    found = import_options(config, NAMES, ONE, Option.uniform(base), "FILE")
    return [str(found[name]) for name in NAMES]


def test_the_first_enabled_match_decides() -> None:
    file = a_file(glob("*fc1", "mx"), glob("*", "nv"), mx=MX, nv=NV)
    assert read(file) == ["mxfp8", "nvfp4"]
    file["matchers"] = dict(reversed(file["matchers"].items()))
    assert read(file) == ["nvfp4", "nvfp4"]
    file = a_file(glob("*", "nv", enabled=False), glob("*fc1", "mx"), mx=MX, nv=NV)
    assert read(file) == ["mxfp8", "bf16"]


def test_what_does_not_match_or_does_not_apply_stays_at_the_base() -> None:
    assert read({}) == ["bf16", "bf16"]
    assert read({"configs": None, "matchers": None}, "nvfp4") == ["nvfp4", "nvfp4"]
    silent = a_file(glob("*fc1", "mx"), mx={"fp8_quantization_recipe": "mxfp8"})
    assert read(silent) == ["bf16", "bf16"]  # Megatron ignores it in a BF16 run
    assert read(silent, "nvfp4") == ["mxfp8", "nvfp4"]
    high = a_file(glob("*fc1", "high"), high={})
    assert read(high, "mxfp8") == ["bf16", "mxfp8"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"configs": [], "matchers": 3}, "must be mappings"),
        ({"matchers": {"a": 3}}, "matcher 'a' must be a mapping"),
        (a_file(glob("*", "mx", type="regex"), mx=MX), "has type 'regex'"),
        (a_file(glob("*", "nv"), mx=MX), r"one of the configs \(mx\), got 'nv'"),
        (a_file({"type": "glob", "config": "mx", "enabled": True}, mx=MX), "needs a pattern"),
        (
            {"configs": {"mx": {"training_recipe": MX}}, "matchers": {"a": glob("*", "mx")}},
            "must have transformer_engine_config_type",
        ),
        (a_file(glob("*", "mx"), mx={"fp8_quantization_recipe": "tensorwise"}), "no format"),
    ],
)
def test_malformed_files_are_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        read(config)
    assert str(caught.value).startswith("FILE")


def test_a_recipe_is_a_mapping_and_stands_alone() -> None:
    file = a_file(glob("*", "mx"), mx=MX)
    file["configs"]["mx"]["training_recipe"] = None
    with pytest.raises(UsageError, match="must have a training_recipe"):
        read(file)
    file["configs"]["mx"] |= {"training_recipe": MX, "more": 1}
    with pytest.raises(UsageError, match="unknown key 'more'"):
        read(file)
    file["configs"]["mx"] |= {5: 1}  # YAML has keys of any type
    with pytest.raises(UsageError, match="unknown key '5'"):
        read(file)
    with pytest.raises(UsageError, match="unknown field '5'"):
        read(a_file(glob("*", "mx"), mx={5: 1, "more": 2}))


def test_evaluation_recipes_that_differ_are_noticed() -> None:
    file = a_file(glob("*", "mx"), mx=MX)
    assert not evaluates_otherwise(file)
    file["configs"]["mx"]["evaluation_recipe"] = dict(MX)
    assert not evaluates_otherwise(file)
    file["configs"]["mx"]["evaluation_recipe"] = {}
    assert evaluates_otherwise(file)
    assert read(file) == ["mxfp8", "mxfp8"]


@pytest.mark.parametrize(
    ("layers", "stages", "chunks"), [(7, 2, 1), (8, 3, 1), (8, 2, 3), (8, 0, 1)]
)
def test_layers_that_do_not_divide_are_refused(layers: int, stages: int, chunks: int) -> None:
    with pytest.raises(UsageError, match="do not divide evenly"):
        Stages.even(layers, stages, chunks)


def test_chunks_and_layers_are_checked() -> None:
    with pytest.raises(UsageError, match="3 model chunks for 2 pipeline stages"):
        Stages(2, (1, 2, 3))
    with pytest.raises(UsageError, match="the pipeline holds 2 layers"):
        Stages(1, (2,)).local("decoder.layers.2.mlp.linear_fc1")


def test_several_files_are_named_by_stage() -> None:
    assert stage_paths(Path("a/b.yaml"), 1) == [Path("a/b.yaml")]
    names = [Path("a/b.stage0.yaml"), Path("a/b.stage1.yaml")]
    assert stage_paths(Path("a/b.yaml"), 2) == names
