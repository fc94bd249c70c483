"""Precision files, as Megatron's own loader and matchers read them, in every layout."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_snip.errors import UsageError
from megatron_snip.linears.te.precision_config import (
    PrecisionFile,
    config_text,
    export_configs,
    stage_paths,
)
from megatron_snip.linears.te.recipe import RecipeFields, TERecipe, needed_precision
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.options import Option
from megatron_snip.planning.stage_layers import StageLayers
from tests.unit.planning.build import MODULES

EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
MIXED = Option.parse("nvfp4-mxfp8-bf16")
UNIFORM = [TERecipe(*[name] * 3) for name, each in RECIPES.items() if not each.has_history]
RECIPE = {recipe.option: recipe for recipe in (*UNIFORM, TERecipe("nvfp4", "mxfp8", "bf16"))}
OPTIONS = tuple(RECIPE)
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (2, 4)]
"""Pipeline stages and chunks a stage; eight layers."""


def counted(num_stages: int, counts: Sequence[int]) -> StageLayers:
    """Of stages whose chunks have so many decoder layers, in forward order."""
    ends = [*itertools.accumulate(counts)]
    chunks = [
        {f"decoder.layers.{end - count + i}": i for i in range(count)}
        for count, end in zip(counts, ends, strict=True)
    ]
    return StageLayers([chunks[stage::num_stages] for stage in range(num_stages)])


def chunked(stages: int, chunks: int, layers: int = 8) -> StageLayers:
    return counted(stages, (layers // (stages * chunks),) * (stages * chunks))


def mixed_plan(layers: int = 8, modules: tuple[str, ...] = MODULES) -> dict[str, Option]:
    names = [f"decoder.layers.{i}.{module}" for i in range(layers) for module in modules]
    return dict(zip(names, itertools.cycle((*OPTIONS, *OPTIONS[::-1], OPTIONS[1])), strict=False))


def megatron_names(stages: int, chunks: int, layers: int = 8) -> dict[str, tuple[int, str]]:
    """Global name -> (stage, name in the chunk), by Megatron's own offsets."""
    config = TransformerConfig(num_layers=layers, hidden_size=8, num_attention_heads=1)
    config.pipeline_model_parallel_size = stages
    config.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    found = {}
    for stage, chunk in itertools.product(range(stages), range(chunks)):
        vp_stage = chunk if chunks > 1 else None
        if stages == 1 and chunks > 1:  # Megatron knows no interleaving of one stage
            offset = chunk * (layers // chunks)
        else:
            offset = get_transformer_layer_offset(config, vp_stage, stage)
        for local in range(layers // (stages * chunks)):
            for module in MODULES:
                name = f"decoder.layers.{offset + local}.{module}"
                found[name] = (stage, f"decoder.layers.{local}.{module}")
    return found


loaded = functools.cache(RecipeConfig.from_yaml_file)


def as_megatron_reads(path: Path, name: str) -> TERecipe | None:
    """The recipe that Megatron would give the module `name`; None where no matcher matches."""
    found = get_quant_config_or_none(name, loaded(str(path)))
    if found is None:
        return None
    params = TEQuantizationParams.parse_from_config(found)
    assert params.evaluation_recipe is None
    fields = {n: getattr(v, "value", v) for n, v in vars(params.training_recipe).items() if v}
    return RecipeFields(**fields).recipe


def written(
    linears: Mapping[str, Option], stages: StageLayers, folder: Path
) -> tuple[list[dict[str, Any]], list[Path]]:
    configs = export_configs(linears, RECIPE, stages)
    paths = stage_paths(folder / "out.yaml", len(configs))
    for path, config in zip(paths, configs, strict=True):
        path.write_text(
            config_text(config, ["a plan", "of two lines"], needed_precision(RECIPE.values()).flags)
        )
    return configs, paths


@pytest.mark.parametrize(("stages", "chunks"), LAYOUTS)
def test_megatron_gives_every_module_its_recipe(stages: int, chunks: int, tmp_path: Path) -> None:
    """And import reads it back. Chunks of a stage must agree: then the plan is by module alone."""
    plan, layout = mixed_plan(), chunked(stages, chunks)
    if chunks > 1:
        plan = {name: OPTIONS[MODULES.index(name.split(".", 3)[3])] for name in plan}
    configs, paths = written(plan, layout, tmp_path)
    assert len(paths) == (stages if chunks == 1 else 1)
    imported = [PrecisionFile(config, "x") for config in configs]
    places = layout.local_names(plan)
    for name, (stage, local) in megatron_names(stages, chunks).items():
        assert places[name] == (stage, local)
        which = stage if len(paths) > 1 else 0
        assert as_megatron_reads(paths[which], local) == RECIPE[plan[name]], name
        assert imported[which].option(local, OPTIONS[0]) == plan[name]
    for which, file in enumerate(imported):
        assert file.stage == (which if len(paths) > 1 else None)
        assert file.stage_layers == layout
        own = [local for stage, local in places.values() if len(paths) == 1 or stage == which]
        assert file.unmatched(own) == []


def test_two_chunks_of_a_stage_cannot_differ() -> None:
    plan = {f"decoder.layers.{i}.mlp.linear_fc1": OPTIONS[0] for i in range(4)}
    plan["decoder.layers.2.mlp.linear_fc1"] = OPTIONS[1]
    with pytest.raises(UsageError, match=r"layers\.2.*layers\.0.*both.*stage 0") as caught:
        export_configs(plan, RECIPE, chunked(2, 2, layers=4))
    assert "--snip-collect-only" in str(caught.value)
    # Options that differ in name alone do not differ.
    recipes = {OPTIONS[0]: RECIPE[OPTIONS[1]], OPTIONS[1]: RECIPE[OPTIONS[1]]}
    assert len(export_configs(plan, recipes, chunked(2, 2, layers=4))) == 1


def test_names_match_themselves_alone_and_experts_also_one_by_one(tmp_path: Path) -> None:
    """Of stages with two and eleven layers; layer 1 is not layer 10."""
    plan, stages = mixed_plan(13, ("mlp.linear_fc1", *EXPERTS)), counted(2, (2, 11))
    configs, paths = written(plan, stages, tmp_path)
    for name, (stage, local) in stages.local_names(plan).items():
        option = plan[name]
        assert as_megatron_reads(paths[stage], local) == RECIPE[option]
        head, _, tail = local.rpartition(".linear_")
        for expert in (0, 63) if "experts" in name else ():
            alone = f"{head}.local_experts.{expert}.linear_{tail}"
            assert as_megatron_reads(paths[stage], alone) == RECIPE[option]
            file = PrecisionFile(configs[stage], "x")
            assert file.option(local, OPTIONS[0], True) == option
    assert as_megatron_reads(paths[0], "decoder.layers.1.mlp.linear_fc2") is None
    lines = paths[0].read_text().splitlines()
    assert lines[:2] == ["# a plan", "# of two lines"]
    assert lines[2].startswith("# Give the run a default low precision as well")
    (bf16,) = export_configs(dict.fromkeys(plan, Option.uniform("bf16")), RECIPE, stages)
    assert "configs:" in config_text(bf16, ["one line"], "").splitlines()[1]


def test_any_block_is_where_the_run_had_it(tmp_path: Path) -> None:
    """As of `E|tt|m|ttL`, and with numbers that no count of layers gives."""
    mtp = "mtp.layers.0.mtp_model_layer.layers.1.mlp.linear_fc1"
    plan = {**mixed_plan(4), mtp: MIXED}
    first = {"decoder.layers.0": 0, "decoder.layers.1": 2}
    last = {"decoder.layers.2": 0, "decoder.layers.3": 1}
    stages = StageLayers([[{}], [first], [{"mtp.layers.0": 0}], [last]])
    places = stages.local_names(plan)
    assert places[mtp] == (2, mtp)
    assert places["decoder.layers.1.mlp.linear_fc1"] == (1, "decoder.layers.2.mlp.linear_fc1")
    configs, paths = written(plan, stages, tmp_path)
    assert [len(config["matchers"]) for config in configs] == [0, 8, 1, 8]
    assert as_megatron_reads(paths[0], "decoder.layers.0.mlp.linear_fc1") is None
    for name, (stage, local) in places.items():
        assert as_megatron_reads(paths[stage], local) == RECIPE[plan[name]]
    with pytest.raises(UsageError, match=r"no pipeline stage holds decoder\.layers\.4"):
        stages.local_names(["decoder.layers.4.mlp.linear_fc1"])


PARAMS = {"transformer_engine_config_type": "TEQuantizationParams"}


def a_file(*matchers: dict[str, Any], **configs: dict[str, Any]) -> dict[str, Any]:
    named = {name: {**PARAMS, "training_recipe": recipe} for name, recipe in configs.items()}
    return {"configs": named, "matchers": {str(i): m for i, m in enumerate(matchers)}}


def glob(pattern: str, config: str, **changes: Any) -> dict[str, Any]:
    return {"type": "glob", "pattern": pattern, "config": config, "enabled": True, **changes}


MX = {"fp8_quantization_recipe": "mxfp8", "override_nonquantized_autocast": True}
NAMES = ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"]


def read(config: dict[str, Any], base: str = "bf16") -> list[str]:
    file = PrecisionFile(config, "FILE")
    return [str(file.option(name, Option.uniform(base))) for name in NAMES]


def test_what_does_not_match_or_does_not_apply_stays_at_the_base() -> None:
    assert read({"matchers": {}}) == ["bf16", "bf16"]
    assert read({"configs": None, "matchers": None}, "nvfp4") == ["nvfp4", "nvfp4"]
    silent = a_file(glob("*fc1", "mx"), mx={"fp8_quantization_recipe": "mxfp8"})
    assert read(silent) == ["bf16", "bf16"]  # Megatron ignores it in a BF16 run
    assert read(silent, "nvfp4") == ["mxfp8", "nvfp4"]
    high = a_file(glob("*fc1", "high"), high={})
    assert read(high, "mxfp8") == ["bf16", "mxfp8"]


def one(**fields: Any) -> dict[str, Any]:
    """A file with one config of these fields."""
    return {"configs": {"mx": fields}, "matchers": {"a": glob("*", "mx")}}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"decoder.layers.0.mlp.linear_fc1": "fp8"}, "no precision file of Megatron"),
        ({}, "no precision file of Megatron"),
        ({"configs": {"mx": {}}}, "no 'matchers'"),  # Megatron would crash
        ({"configs": 3, "matchers": {}}, "configs: must be a valid dictionary, got 3"),
        ({"matchers": {"a": 3}}, "matchers: a: must be a valid dictionary, got 3"),
        (a_file(glob("*", "mx", type="regex"), mx=MX), r"matchers: 0\.type: must be 'glob', got"),
        (a_file(glob("*", "nv"), mx=MX), r"0\.config: must be one of the configs \(mx\), got 'nv'"),
        (a_file({"type": "glob", "config": "mx", "enabled": True}, mx=MX), "pattern: Field req"),
        (one(training_recipe=MX), "config 'mx': transformer_engine_config_type: Field required"),
        (one(transformer_engine_config_type="?", training_recipe=MX), "be 'TEQuantizationParams'"),
        (one(**PARAMS), "config 'mx': training_recipe: Field required"),
        (one(**PARAMS, training_recipe=MX, more=1), "unknown key 'more'"),
        # YAML has keys of any type
        (a_file(glob("*", "mx"), mx={5: 1}), r"training_recipe\.5: Keys should be strings"),
        (a_file(glob("*", "mx"), mx={"more": 2}), "unknown key 'training_recipe.more'"),
        (a_file(glob("*", "mx"), mx={"fp8_quantization_recipe": "delayed"}), "no format"),
        # Each is tried at each linear: thousands of both would take seconds.
        (a_file(*(glob(f"*.{i}", "mx") for i in range(1001)), mx=MX), "1001 matchers .* at most"),
    ],
)
def test_malformed_files_are_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        read(config)
    assert str(caught.value).startswith("FILE")


def test_evaluation_recipes_that_differ_are_noticed() -> None:
    for evaluation, differs in ((None, False), (MX, False), ({}, True)):
        more = {} if evaluation is None else {"evaluation_recipe": evaluation}
        file = one(**PARAMS, training_recipe=MX, **more)
        assert PrecisionFile(file, "x").has_evaluation_recipes() == differs
        assert read(file) == ["mxfp8", "mxfp8"]


def test_matchers_that_fit_no_linear_are_found() -> None:
    """One of experts fits if either of their names does, and one behind others may fit as well."""
    expert, alone = "mlp.experts.linear_fc1", "mlp.experts.local_experts.*.linear_fc1"
    patterns = {"*": True, "decoder.layers.0.mlp.linear_fc1": True, "*.linear_fc3": False}
    patterns |= {"decoder.layers.9.*": False, "decoder.layers.0.mlp.linear_fc": False}
    patterns |= {f"decoder.layers.1.{expert}": True, f"decoder.layers.1.{alone}": True}
    file = PrecisionFile(a_file(*(glob(each, "mx") for each in patterns), mx=MX), "x")
    wanted = [str(i) for i, fits in enumerate(patterns.values()) if not fits]
    assert file.unmatched([*NAMES, f"decoder.layers.1.{expert}"]) == wanted
