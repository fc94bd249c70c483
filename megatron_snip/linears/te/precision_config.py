"""Megatron's own precision files (`--te-precision-config-file`), from plans and to plans.

    configs:                    recipes by name
      fp8: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {...}}
    matchers:                   ordered globs on module names; the first that matches decides
      decoder.layers.0.mlp.linear_fc1: {type: glob, pattern: ..., config: fp8, enabled: true}

Megatron matches the names that a model chunk gives its modules, in which `layers.N` counts from 0
in every chunk. A plan's names are global; `Stages` knows which layers a chunk holds. Where pipeline
stages need different recipes at the same local layer, each stage needs a file of its own; where two
chunks of one stage do, no file can express it.

Layers of multi-token prediction are all on the last chunk of the last stage and have the same
numbers there. Layers of an encoder are known only without pipeline stages. Experts are named with
and without the index that Megatron's sequential experts have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from megatron_snip.errors import UsageError
from megatron_snip.linears.te.recipe import TERecipe, applies, recipe_from_fields, run_flags
from megatron_snip.options import Option
from megatron_snip.types import glob_matches, split_linear_name

CONFIG_TYPE = "transformer_engine_config_type"
_PARAMS = "TEQuantizationParams"
_TRAINING = "training_recipe"
_EVALUATION = "evaluation_recipe"
_EXPERTS = ".experts.linear_"
_ADVICE = """\
Give the run a default low precision as well ({flags}).
In a BF16 run Megatron-Core before 0.19 quantizes weights in the first step and never again
(NVIDIA/Megatron-LM#5641), and no release pads experts' tokens as low precision needs."""


@dataclass(frozen=True)
class Stages:
    """Which of the decoder's layers each model chunk holds.

    Attributes:
        num_stages: pipeline-parallel size.
        chunks: layers of each chunk in the data's order: chunk 0 of every stage, then chunk 1 of
            every stage, and so on; one chunk per stage without interleaving.

    Raises:
        UsageError: if the number of chunks is not a multiple of the number of stages.
    """

    num_stages: int
    chunks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_stages < 1 or not self.chunks or len(self.chunks) % self.num_stages:
            raise UsageError(
                f"{len(self.chunks)} model chunks for {self.num_stages} pipeline stages; give the "
                "same number of chunks for every stage"
            )

    @classmethod
    def even(cls, num_layers: int, num_stages: int) -> Stages:
        """Return stages of equal size, one chunk each.

        Raises:
            UsageError: if layers do not divide evenly.
        """
        if num_stages < 1 or num_layers % num_stages:
            raise UsageError(
                f"{num_layers} layers do not divide evenly into {num_stages} pipeline stages; give "
                "the layers of each chunk"
            )
        return cls(num_stages, (num_layers // num_stages,) * num_stages)

    def local(self, name: str) -> tuple[int, str]:
        """Return (stage, the name that Megatron matches there) of a global name.

        Raises:
            UsageError: if it is no linear's name, or the layer does not exist or is an encoder's
                and there are several chunks.
        """
        block, layer, module = split_linear_name(name)
        if block == "encoder" and len(self.chunks) > 1:
            raise UsageError(
                f"'{name}': which layers of an encoder a pipeline stage holds is not known here; "
                "give --pipeline-stages 1, and train without pipeline stages"
            )
        if block != "decoder":
            return (len(self.chunks) - 1) % self.num_stages, name
        ends = list(accumulate(self.chunks))
        if layer >= ends[-1]:
            raise UsageError(f"'{name}': the pipeline holds {ends[-1]} layers")
        chunk = next(i for i, end in enumerate(ends) if layer < end)
        local = layer - (ends[chunk] - self.chunks[chunk])
        return chunk % self.num_stages, f"{block}.layers.{local}.{module}"


def num_layers(names: Iterable[str]) -> int:
    """Return the number of decoder layers that the names imply."""
    split = map(split_linear_name, names)
    return max((layer + 1 for block, layer, _ in split if block == "decoder"), default=0)


def export_configs(
    linears: Mapping[str, Option], recipes: Mapping[Option, TERecipe], stages: Stages
) -> list[dict[str, Any]]:
    """Return the file of every pipeline stage, as plain types; one file if all can share it.

    Args:
        linears: option of each linear, by global name.
        recipes: what each of these options is to run.
        stages: where the layers are.

    Raises:
        UsageError: if two chunks of a stage need different recipes for one local name.
    """
    tables: list[dict[str, tuple[str, Option]]] = [{} for _ in range(stages.num_stages)]
    for name, option in linears.items():
        stage, local = stages.local(name)
        other, taken = tables[stage].setdefault(local, (name, option))
        if recipes[taken] != recipes[option]:
            raise UsageError(
                f"'{name}' ({option}) and '{other}' ({taken}) are both '{local}' on pipeline stage "
                f"{stage}, so no precision file can distinguish them; train without interleaving, "
                "or with SNIP itself (--snip-plan-file PLAN --snip-collect-only)"
            )
    merged: dict[str, tuple[str, Option]] = {}
    for table in tables:
        for local, (name, option) in table.items():
            if recipes[merged.setdefault(local, (name, option))[1]] != recipes[option]:
                return [_config(each, recipes) for each in tables]
    return [_config(merged, recipes)]


def _config(
    table: Mapping[str, tuple[str, Option]], recipes: Mapping[Option, TERecipe]
) -> dict[str, Any]:
    matchers = {}
    for local, (name, option) in table.items():
        for pattern in _patterns(local):
            key = name if pattern == local else f"{name} (sequential experts)"
            matchers[key] = {
                "type": "glob",
                "pattern": pattern,
                "config": str(option),
                "enabled": True,
            }
    used = dict.fromkeys(option for _, option in table.values())
    configs = {
        str(option): {CONFIG_TYPE: _PARAMS, _TRAINING: recipes[option].fields()} for option in used
    }
    return {"configs": configs, "matchers": matchers}


def _patterns(local: str) -> list[str]:
    """Return the globs of one linear: names hold no glob characters, so they match themselves."""
    if _EXPERTS not in local:
        return [local]
    head, tail = local.rsplit(_EXPERTS, 1)
    return [local, f"{head}.experts.local_experts.*.linear_{tail}"]


def config_text(config: Mapping[str, Any], comment: str) -> str:
    """Return the YAML of a file, one matcher per line, under a comment and how to use the file."""
    fields = [one[_TRAINING] for one in config["configs"].values()]
    flags = run_flags(recipe_from_fields(each, "an exported file") for each in fields)
    advice = _ADVICE.format(flags=flags).splitlines() if flags else ()
    head = "".join(f"# {line}\n" for line in (*comment.splitlines(), *advice))
    body = yaml.safe_dump(dict(config), sort_keys=False, default_flow_style=None, width=10_000)
    return head + body


def import_option(
    config: Mapping[str, Any],
    name: str,
    stages: Stages,
    base: Option,
    source: str,
    sequential_experts: bool = False,
) -> Option:
    """Return the option that Megatron would give a linear under a precision file.

    Args:
        config: the file's content.
        name: global name of the linear.
        stages: where the layers are.
        base: what the run does by default: BF16 unless it has `--fp8-format` or `--fp4-format`.
            It applies where no matcher matches and where a recipe does not override it.
        source: name of the file in error messages.
        sequential_experts: experts are modules of their own, `local_experts.N`, and not one
            grouped linear; the first stands for all, which share a precision.

    Raises:
        UsageError: if the file is malformed or holds a recipe that is no format of a plan.
    """
    configs, matchers = _parts(config, source)
    local = _patterns(stages.local(name)[1])[-1 if sequential_experts else 0].replace("*", "0")
    key = next((key for pattern, key in matchers if glob_matches(local, pattern)), None)
    if key is None:
        return base
    where = f"{source}: config '{key}'"
    fields = _training_fields(configs[key], where)
    recipe = recipe_from_fields(fields, where)
    quantized_run = base != TERecipe().option
    return recipe.option if applies(fields, quantized_run) else base


def evaluates_otherwise(config: Mapping[str, Any]) -> bool:
    """Return whether an imported file has evaluation recipes, which no plan can hold."""
    each = (config.get("configs") or {}).values()
    return any(_EVALUATION in one and one[_EVALUATION] != one.get(_TRAINING) for one in each)


def _parts(config: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the configs and the enabled matchers as (pattern, config)."""
    if config and not config.keys() & {"configs", "matchers"}:
        raise UsageError(f"{source} is no precision file of Megatron: no 'matchers'")
    configs, matchers = config.get("configs") or {}, config.get("matchers") or {}
    if not isinstance(configs, dict) or not isinstance(matchers, dict):
        raise UsageError(f"{source}: 'configs' and 'matchers' must be mappings")
    found: list[tuple[str, str]] = []
    for name, matcher in matchers.items():
        if not isinstance(matcher, dict):
            raise UsageError(f"{source}: matcher '{name}' must be a mapping")
        if not matcher.get("enabled", False):
            continue
        if matcher.get("type") != "glob":
            raise UsageError(
                f"{source}: matcher '{name}' has type {matcher.get('type')!r}; Megatron knows glob"
            )
        pattern, key = matcher.get("pattern"), matcher.get("config")
        if not isinstance(pattern, str) or not isinstance(key, str) or key not in configs:
            raise UsageError(
                f"{source}: matcher '{name}' needs a pattern and one of the configs "
                f"({', '.join(map(str, configs))}), got {key!r}"
            )
        found.append((pattern, key))
    return configs, found


def _training_fields(config: Any, where: str) -> dict[str, Any]:
    if not isinstance(config, dict) or config.get(CONFIG_TYPE) != _PARAMS:
        raise UsageError(f"{where} must have {CONFIG_TYPE}: {_PARAMS}")
    unknown = sorted(set(config) - {CONFIG_TYPE, _TRAINING, _EVALUATION}, key=str)
    if unknown:
        raise UsageError(f"{where}: unknown key '{unknown[0]}'")
    fields = config.get(_TRAINING)
    if not isinstance(fields, dict):
        raise UsageError(f"{where} must have a {_TRAINING}")
    return fields


def stage_paths(path: Path, count: int) -> list[Path]:
    """Return where the files go: `path` itself, or `NAME.stage0.yaml` and so on for several."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}.stage{i}{path.suffix}") for i in range(count)]
