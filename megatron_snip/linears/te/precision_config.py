"""Megatron's own precision files (`--te-precision-config-file`), from plans and to plans.

    configs:                    recipes by name
      fp8: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {...}}
    matchers:                   ordered globs on module names; the first that matches decides
      decoder.layers.0.mlp.linear_fc1: {type: glob, pattern: ..., config: fp8, enabled: true}
    pipeline_stage: 0           of a file for one stage
    stage_layers: [[{...}]]     where the layers are: `planning/stage_layers.py`

Megatron ignores the last two, by which `import` knows what the file is for. Megatron matches the
names that a model chunk gives its modules, in which `layers.N` counts from 0 in every chunk. A
plan's names are global; `StageLayers` knows which layers a chunk holds. Where pipeline stages need
different recipes at the same local layer, each stage needs a file of its own; where two chunks of
one stage do, no file can express it.

Experts are named with and without the index that Megatron's sequential experts have.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from megatron_snip.errors import UsageError
from megatron_snip.files import checked
from megatron_snip.linears.te.recipe import RecipeFields, TERecipe, storage_fields
from megatron_snip.options import BF16, Option
from megatron_snip.output import yaml_text
from megatron_snip.planning.stage_layers import MAX_STAGE, StageLayers
from megatron_snip.types import glob_pattern, has_wildcards

_TRAINING = "training_recipe"
_ADVICE = """\
Give the run a default low precision as well ({flags}).
In a BF16 run Megatron-Core before 0.19 quantizes weights in the first step and never again
(NVIDIA/Megatron-LM#5641), and no release pads experts' tokens as low precision needs."""


def export_configs(
    linears: Mapping[str, Option],
    recipes: Mapping[Option, TERecipe],
    stage_layers: StageLayers,
    stores_weights: bool = False,
) -> list[dict[str, Any]]:
    """Return the file of every pipeline stage, as plain types; one file if all can share it.

    Args:
        linears: option of each linear, by global name.
        recipes: Transformer Engine's recipe of each of these options.
        stage_layers: where the layers are.
        stores_weights: whether each recipe also says how the weight is stored; Megatron-Core
            before 0.19 has no such fields.

    Raises:
        UsageError: if two chunks of a stage need different recipes for one local name.
    """
    layers = stage_layers.model_dump(mode="json")
    tables: list[dict[str, tuple[str, Option]]] = [{} for _ in layers]
    for name, (stage, local) in stage_layers.local_names(linears).items():
        option = linears[name]
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
                return [
                    {
                        **_config(table, recipes, stores_weights),
                        "pipeline_stage": stage,
                        "stage_layers": layers,
                    }
                    for stage, table in enumerate(tables)
                ]
    return [{**_config(shared, recipes, stores_weights), "stage_layers": layers}]


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


def _first_expert(local: str) -> str:
    """Return the name of the first of a layer's sequential experts."""
    return _sequential(local).replace("*", "0")


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


class _Purpose(BaseModel):
    """What an exported file is for."""

    pipeline_stage: Annotated[int, Field(ge=0, le=MAX_STAGE)] | None = None
    stage_layers: StageLayers | None = None


class PrecisionFile:
    """A file to import.

    Attributes:
        source: how error messages call it.
        configs: recipes by name. Those that no linear gets are not checked.
        matchers: those that are enabled, by name; the first that matches decides.
        stage: the pipeline stage that it is for; None if it does not say so.
        stage_layers: where the layers are that it is for; None if it does not say so.
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
        purpose = checked(_Purpose, dict(value), source)
        self.stage = purpose.pipeline_stage
        self.stage_layers = purpose.stage_layers
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

    def option(self, local: str, base: Option, sequential_experts: bool = False) -> Option:
        """Return the option that Megatron would give a linear.

        Args:
            local: name of the linear in its model chunk.
            base: what the run does by default: BF16 unless it has `--fp8-format` or
                `--fp4-format`. It applies where no matcher matches and where a recipe does not
                override it.
            sequential_experts: experts are modules of their own, `local_experts.N`, and not one
                grouped linear; the first stands for all, which share a precision.

        Raises:
            UsageError: if the config is malformed, or its recipe is no format of a plan.
        """
        if sequential_experts:
            local = _first_expert(local)
        matcher = self._matcher_of(local)
        if matcher is None:
            return base
        key = matcher.config
        config = checked(_Config, self.configs[key], f"{self.source}: config '{key}'")
        fields = config.training_recipe
        return fields.recipe.option if fields.applies(job_is_quantized=base != BF16) else base

    def unmatched(self, local_names: Iterable[str]) -> list[str]:
        """Return the names of the matchers that fit no linear.

        Experts are tried under both names, since `export` writes a matcher for each.

        Args:
            local_names: names of the linears in their model chunks.
        """
        names = {spelled for name in local_names for spelled in (name, _first_expert(name))}
        found = []
        for key, matcher in self.matchers.items():
            if has_wildcards(matcher.pattern):
                pattern = glob_pattern(matcher.pattern)
                fits = any(pattern.match(name) for name in names)
            else:
                fits = matcher.pattern in names
            if not fits:
                found.append(str(key))
        return found

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

    def follows_the_job(self) -> bool:
        """Return whether a recipe keeps a quantized job's own, as delayed scaling needs."""
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
