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

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel

from megatron_snip.errors import UsageError
from megatron_snip.files import checked
from megatron_snip.linears.te.recipe import RecipeFields, TERecipe, storage_fields
from megatron_snip.options import BF16, Option
from megatron_snip.output import yaml_text
from megatron_snip.types import glob_pattern, has_wildcards, split_linear_name

_TRAINING = "training_recipe"
_ADVICE = """\
Give the run a default low precision as well ({flags}).
In a BF16 run Megatron-Core before 0.19 quantizes weights in the first step and never again
(NVIDIA/Megatron-LM#5641), and no release pads experts' tokens as low precision needs."""


@dataclass(frozen=True)
class Stages:
    """Which of the decoder's layers each model chunk holds.

    Attributes:
        num_stages: pipeline-parallel size.
        chunks: number of layers of each chunk in forward order: chunk 0 of every stage, then chunk
            1 of every stage, and so on; one chunk per stage without interleaving.

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
    def even(cls, num_layers: int, num_stages: int) -> Self:
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
            return self.num_stages - 1, name
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
    linears: Mapping[str, Option],
    recipes: Mapping[Option, TERecipe],
    stages: Stages,
    stores_weights: bool = False,
) -> list[dict[str, Any]]:
    """Return the file of every pipeline stage, as plain types; one file if all can share it.

    Args:
        linears: option of each linear, by global name.
        recipes: Transformer Engine's recipe of each of these options.
        stages: where the layers are.
        stores_weights: whether each recipe also says how the weight is stored; Megatron-Core
            before 0.19 has no such fields.

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
    shared: dict[str, tuple[str, Option]] = {}
    for table in tables:
        for local, (name, option) in table.items():
            _, taken = shared.setdefault(local, (name, option))
            if recipes[taken] != recipes[option]:  # each stage needs a file of its own
                return [_config(table, recipes, stores_weights) for table in tables]
    return [_config(shared, recipes, stores_weights)]


def _config(
    table: Mapping[str, tuple[str, Option]],
    recipes: Mapping[Option, TERecipe],
    stores_weights: bool,
) -> dict[str, Any]:
    """Return one file as plain types; `table` is {local name: (global name, option)}."""
    matchers = {}
    for local, (name, option) in table.items():
        for pattern in dict.fromkeys((local, _sequential(local))):
            key = name if pattern == local else f"{name} (sequential experts)"
            matchers[key] = {
                "type": "glob",
                "pattern": pattern,
                "config": str(option),
                "enabled": True,
            }
    used = dict.fromkeys(option for _, option in table.values())
    type_field = {"transformer_engine_config_type": "TEQuantizationParams"}
    configs = {}
    for option in used:
        fields = recipes[option].fields()
        if stores_weights:
            fields |= storage_fields(recipes[option])
        configs[str(option)] = {**type_field, _TRAINING: fields}
    return {"configs": configs, "matchers": matchers}


def _sequential(local: str) -> str:
    """Return the glob of a linear whose experts are modules of their own.

    Names hold no glob characters, so that of any other linear is its own glob.
    """
    return local.replace(".experts.linear_", ".experts.local_experts.*.linear_")


def config_text(config: Mapping[str, Any], comment: Sequence[str], flags: str) -> str:
    """Return the YAML of a file, one matcher per line, under a comment and how to use the file.

    Args:
        config: as Megatron reads it.
        comment: lines without a line break.
        flags: Megatron's flags for the low precision that the run needs by default; may be empty.
    """
    advice = _ADVICE.format(flags=flags).splitlines() if flags else ()
    return yaml_text(config, (*comment, *advice), default_flow_style=None, width=10_000)


_MAX_GLOBS = 1000
"""Most matchers with wildcards; each is tried on each linear."""


class _Matcher(BaseModel):
    type: Literal["glob"]
    pattern: str
    config: str | int


class _Config(BaseModel, extra="forbid"):
    transformer_engine_config_type: Literal["TEQuantizationParams"]
    training_recipe: RecipeFields
    evaluation_recipe: dict[Any, Any] | None = None


class PrecisionFile:
    """A file to import.

    Attributes:
        source: how error messages call it.
        configs: recipes by name. Those that no linear gets are not checked.
        matchers: those that are enabled, by name; the first that matches decides.
    """

    def __init__(self, value: Mapping[str, Any], source: str) -> None:
        """Check the matchers of a file's content.

        Raises:
            UsageError: if the file is malformed.
        """
        if "matchers" not in value:
            raise UsageError(f"{source} is no precision file of Megatron: no 'matchers'")
        self.source = source
        self.configs = checked(dict[Any, Any], value.get("configs") or {}, f"{source}: configs")
        matchers = checked(
            dict[Any, dict[Any, Any]], value.get("matchers") or {}, f"{source}: matchers"
        )
        enabled = {name: each for name, each in matchers.items() if each.get("enabled")}
        self.matchers = checked(dict[Any, _Matcher], enabled, f"{source}: matchers")
        self._ordered = list(self.matchers.values())
        self._exact: dict[str, int] = {}
        self._globs: list[tuple[int, re.Pattern[str]]] = []
        for place, matcher in enumerate(self._ordered):
            if has_wildcards(matcher.pattern):
                self._globs.append((place, glob_pattern(matcher.pattern)))
            else:
                self._exact.setdefault(matcher.pattern, place)
        if len(self._globs) > _MAX_GLOBS:
            raise UsageError(
                f"{source}: {len(self._globs)} matchers have wildcards; at most {_MAX_GLOBS}"
            )
        for name, matcher in self.matchers.items():
            if matcher.config not in self.configs:
                known = ", ".join(map(str, self.configs))
                raise UsageError(
                    f"{source}: matchers: {name}.config: must be one of the configs ({known}), "
                    f"got '{matcher.config}'"
                )

    def option(
        self, name: str, stages: Stages, base: Option, sequential_experts: bool = False
    ) -> Option:
        """Return the option that Megatron would give a linear.

        Args:
            name: global name of the linear.
            stages: where the layers are.
            base: what the run does by default: BF16 unless it has `--fp8-format` or
                `--fp4-format`. It applies where no matcher matches and where a recipe does not
                override it.
            sequential_experts: experts are modules of their own, `local_experts.N`, and not one
                grouped linear; the first stands for all, which share a precision.

        Raises:
            UsageError: if the config is malformed, or its recipe is no format of a plan.
        """
        _, local = stages.local(name)
        if sequential_experts:
            local = _sequential(local).replace("*", "0")
        matcher = self._matcher_of(local)
        if matcher is None:
            return base
        key = matcher.config
        config = checked(_Config, self.configs[key], f"{self.source}: config '{key}'")
        fields = config.training_recipe
        return fields.recipe.option if fields.applies(run_is_quantized=base != BF16) else base

    def _matcher_of(self, local: str) -> _Matcher | None:
        """Return the first matcher of a name; a pattern without wildcards is only looked up."""
        exact = self._exact.get(local, len(self._ordered))
        for place, pattern in self._globs:
            if place > exact:
                break
            if pattern.match(local):
                return self._ordered[place]
        return self._ordered[exact] if exact < len(self._ordered) else None

    def has_evaluation_recipes(self) -> bool:
        """Return whether there are evaluation recipes, which no plan can hold."""
        for config in self.configs.values():
            if not isinstance(config, dict):
                continue
            training = config.get(_TRAINING)
            if config.get("evaluation_recipe", training) != training:
                return True
        return False

    def follows_the_run(self) -> bool:
        """Return whether a recipe keeps a quantized run's own, as delayed scaling needs."""
        recipes = (c.get(_TRAINING) for c in self.configs.values() if isinstance(c, dict))
        return any(
            isinstance(recipe, dict) and recipe.get("override_quantized_autocast") is False
            for recipe in recipes
        )

    def stores_weights(self) -> bool:
        """Return whether a recipe says that a weight is stored in FP8 or FP4."""
        for config in self.configs.values():
            recipe = config.get(_TRAINING) if isinstance(config, dict) else None
            if not isinstance(recipe, dict):
                continue
            if recipe.get("fp8_param") or recipe.get("fp4_param"):
                return True
        return False


def stage_paths(path: Path, count: int) -> list[Path]:
    """Return where the files go: `path` itself, or `NAME.stage0.yaml` and so on for several."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}.stage{i}{path.suffix}") for i in range(count)]
