"""Megatron's own precision files (`--te-precision-config-file`), from plans and to plans.

    configs:                    recipes by name
      fp8: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {...}}
    matchers:                   ordered globs on module names; the first that matches decides
      decoder.layers.0.mlp.linear_fc1: {type: glob, pattern: ..., config: fp8, enabled: true}

Megatron matches the names that a model chunk gives its modules, in which `layers.N` counts from 0
in every chunk. A plan's names are global; `Stages` knows which layers a chunk holds. Where pipeline
stages need different recipes at the same local layer, each stage needs a file of its own; where two
chunks of one stage do, no file can say it.

Layers of another block than `decoder` (multi-token prediction) are all on the last chunk of the
last stage and keep their numbers. Experts are named with and without the index that Megatron's
sequential experts have.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.te_recipe import TERecipe, applies, run_flags
from megatron_snip.types import split_linear_name

CONFIG_TYPE = "transformer_engine_config_type"
_PARAMS = "TEQuantizationParams"
_TRAINING = "training_recipe"
_EVALUATION = "evaluation_recipe"
_EXPERTS = ".experts.linear_"
_ADVICE = """\
Give the run a low precision of its own as well ({flags}).
In a BF16 run Megatron-Core before 0.19 quantizes weights in the first step and never again
(NVIDIA/Megatron-LM#5641), and no release pads experts' tokens as low precision needs."""


@dataclass(frozen=True)
class Stages:
    """How the decoder's layers are dealt out to pipeline stages and their model chunks.

    Attributes:
        num_stages: pipeline-parallel size.
        chunks: layers of each chunk in the data's order: chunk 0 of every stage, then chunk 1 of
            every stage, and so on; one chunk a stage without interleaving.

    Raises:
        UsageError: if the number of chunks is not a multiple of the number of stages.
    """

    num_stages: int
    chunks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_stages < 1 or not self.chunks or len(self.chunks) % self.num_stages:
            raise UsageError(
                f"{len(self.chunks)} model chunks cannot be dealt out to {self.num_stages} "
                "pipeline stages; give as many for every stage"
            )

    @classmethod
    def even(cls, num_layers: int, num_stages: int, chunks_per_stage: int = 1) -> Stages:
        """Deal out layers evenly.

        Raises:
            UsageError: if they do not divide.
        """
        count = num_stages * chunks_per_stage
        if count < 1 or num_layers % count:
            raise UsageError(
                f"{num_layers} layers do not divide evenly into {count} model chunks; give the "
                "layers of each chunk"
            )
        return cls(num_stages, (num_layers // count,) * count)

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return sum(self.chunks)

    def local(self, name: str) -> tuple[int, int, str]:
        """Return (stage, chunk of that stage, the name that Megatron matches there).

        Raises:
            UsageError: if the layer does not exist.
        """
        block, layer, module = _split(name)
        if block != "decoder":
            last = len(self.chunks) - 1
            return last % self.num_stages, last // self.num_stages, name
        if layer >= self.num_layers:
            raise UsageError(f"'{name}': the pipeline holds {self.num_layers} layers")
        ends = list(accumulate(self.chunks))
        chunk = next(i for i, end in enumerate(ends) if layer < end)
        local = layer - (ends[chunk] - self.chunks[chunk])
        text = f"{block}.layers.{local}.{module}"
        return chunk % self.num_stages, chunk // self.num_stages, text


def _split(name: str) -> tuple[str, int, str]:
    """Return (block, layer, module) of a linear's name.

    Raises:
        UsageError: if it is none; plans and problems may come from anywhere.
    """
    try:
        return split_linear_name(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def num_layers(names: Iterable[str]) -> int:
    """Return how many decoder layers the names speak of."""
    split = map(_split, names)
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
        stage, _, local = stages.local(name)
        other, taken = tables[stage].setdefault(local, (name, option))
        if recipes[taken] != recipes[option]:
            raise UsageError(
                f"'{name}' ({option}) and '{other}' ({taken}) are both '{local}' on pipeline stage "
                f"{stage}, so no precision file can tell them apart; train without interleaving, "
                "or with SNIP itself (--snip-plan-file PLAN --snip-freeze-plan)"
            )
    merged: dict[str, tuple[str, Option]] = {}
    for table in tables:
        for local, (name, option) in table.items():
            if recipes[merged.setdefault(local, (name, option))[1]] != recipes[option]:
                return [_config(table, recipes) for table in tables]
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
    """Return the YAML of a file, one matcher a line, under a comment and how to use the file."""
    fields = [one[_TRAINING] for one in config["configs"].values()]
    flags = run_flags(TERecipe.from_fields(each, "an exported file") for each in fields)
    advice = _ADVICE.format(flags=flags).splitlines() if flags else ()
    head = "".join(f"# {line}\n" for line in (*comment.splitlines(), *advice))
    body = yaml.safe_dump(dict(config), sort_keys=False, default_flow_style=None, width=10_000)
    return head + body


def import_options(
    config: Mapping[str, Any],
    names: Iterable[str],
    stages: Stages,
    base: Option,
    source: str,
    sequential_experts: bool = False,
) -> dict[str, Option]:
    """Return the option that Megatron would give every linear under a precision file.

    Args:
        config: the file's content.
        names: global names of the linears.
        stages: where the layers are.
        base: what the run does by default: BF16 unless it has `--fp8-format` or `--fp4-format`.
            It stays where no matcher matches and where a recipe does not override it.
        source: how error messages call the file.
        sequential_experts: experts are modules of their own, `local_experts.N`, and not one
            grouped linear; the first stands for all, which share a precision.

    Raises:
        UsageError: if the file is malformed or holds a recipe that is no format of a plan.
    """
    configs, matchers = _parts(config, source)
    result = {}
    for name in names:
        local = _patterns(stages.local(name)[2])[-1 if sequential_experts else 0]
        result[name] = _matched(configs, matchers, local.replace("*", "0"), base, source)
    return result


def evaluates_otherwise(config: Mapping[str, Any]) -> bool:
    """Return whether a file that was imported has evaluation recipes, which no plan can hold."""
    each = (config.get("configs") or {}).values()
    return any(_EVALUATION in one and one[_EVALUATION] != one.get(_TRAINING) for one in each)


def _parts(config: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the configs and the enabled matchers as (pattern, config)."""
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


def _matched(
    configs: Mapping[str, Any],
    matchers: Sequence[tuple[str, str]],
    local: str,
    base: Option,
    source: str,
) -> Option:
    for pattern, key in matchers:
        if fnmatch.fnmatch(local, pattern):
            fields = _training_fields(configs[key], f"{source}: config '{key}'")
            recipe = TERecipe.from_fields(fields, f"{source}: config '{key}'")
            quantized = base != TERecipe().option
            return recipe.option if applies(fields, quantized) else base
    return base


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
