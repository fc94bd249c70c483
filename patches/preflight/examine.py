"""What SNIP would do with a job that was built: the job's own checks, in the job's order.

Nothing is decided here. `PlannedModel`, `RunPlans` and the tables of flags decide, as they do in
the job; what they decide is put into one record.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_snip.config import AUTO, SnipConfig
from megatron_snip.errors import InfeasiblePlanError, UnsupportedError, UsageError
from megatron_snip.flags import flag_name
from megatron_snip.linears.auto_formats import te_formats
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te.machine import Machine, te_support
from megatron_snip.linears.te.modules import have_te
from megatron_snip.linears.te.recipe_table import JobPrecision
from megatron_snip.options import BF16
from megatron_snip.patches.arguments import PREFIX, settings_in, with_flags_of_the_job
from megatron_snip.patches.attach import tokens_of
from megatron_snip.patches.fast_flags import FAST_FLAGS
from megatron_snip.patches.incompatible import (
    INCOMPATIBLE_FLAGS,
    TE_IS_MISSING,
    check_modules,
    running_settings,
)
from megatron_snip.patches.megatron_bridge.settings import in_bridges_names
from megatron_snip.patches.preflight import costs
from megatron_snip.patches.preflight.job import BRIDGE_LOOP, BuiltJob
from megatron_snip.patches.preflight.stages import Stage, on_all
from megatron_snip.planning.fixed import by_source
from megatron_snip.planning.policies import get_policy
from megatron_snip.run.feasibility import reachable_range
from megatron_snip.run.plans import RunPlans


@dataclass
class Preflight:
    """What SNIP would do with a job.

    Attributes:
        version: of this record.
        layout: sizes of the parallel layout, by short name.
        machine: the GPU and Transformer Engine that the answer is about.
        backend: what runs the linears.
        linears: their numbers: all, those of experts, by pipeline stage; and the parameters that a
            rank of each stage builds.
        flags: the job's settings that SNIP knows: flag, what plans do under it, and how.
        job: share of the linears' FLOPs in each option that the job itself runs.
        fixed: linears whose option is fixed, by what fixes them.
        formats: what plans choose from.
        formats_why: why `auto` takes others than the lowest two; empty if it does not.
        recipes: what runs each format.
        only_measures: whether no plan is made.
        target: `given`, or null; `runs`, what the run has; `least` and `best`, what plans reach;
            `job`, the share that the job itself runs in the lowest precision.
        refused: why the job would end; empty if it runs.
        warnings: what the job would warn of.
        hints: settings that may suit the model better, such as for small linears.
        unknown: what this machine cannot know.
        memory_gib: what SNIP adds to the rank that gets the most (`costs.memory_gib`); computed.
        measuring: what measured iterations cost (`costs.measuring`); computed.
        control_s: seconds of the control plane by phase (`costs.control_seconds`); computed.
        problem: what each linear can run, as a file of `problems/` has it; nothing is measured, so
            all quality losses are 0.
    """

    version: int = 1
    layout: dict[str, int] = field(default_factory=dict)
    machine: str = ""
    backend: str = ""
    linears: dict[str, Any] = field(default_factory=dict)
    flags: list[dict[str, str]] = field(default_factory=list)
    job: dict[str, float] = field(default_factory=dict)
    fixed: dict[str, dict[str, Any]] = field(default_factory=dict)
    formats: list[str] = field(default_factory=list)
    formats_why: str = ""
    recipes: dict[str, str] = field(default_factory=dict)
    only_measures: bool = False
    target: dict[str, float | None] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    memory_gib: dict[str, float] = field(default_factory=dict)
    measuring: dict[str, Any] = field(default_factory=dict)
    control_s: dict[str, float] = field(default_factory=dict)
    problem: dict[str, Any] = field(default_factory=dict)


def examine(job: BuiltJob) -> Preflight:
    """Return what SNIP would do with a job.

    Args:
        job: the job, with its model.

    Raises:
        UsageError: if a setting of SNIP's is wrong by itself.
    """
    found = Preflight(layout=_layout(job), unknown=list(job.notes))
    try:
        config = settings_in(job.args, job.given).model_copy(update={"enabled": True})
    except UsageError as error:
        raise UsageError(_text(error)) from None
    found.target["given"] = (
        config.efficiency_target if "efficiency_target" in config.model_fields_set else None
    )
    first = job.stages[0].chunks
    settings = running_settings(job.args, get_model_config(first[0]))
    config = _check_flags(found, config, [job.args, settings])
    for stage in job.stages:
        _note(found, lambda stage=stage: check_modules(stage.chunks))  # type: ignore[misc]
    models = _models(found, job, config)
    if models:
        _plan(found, job, config, models)
    if job.lacks_te:
        _assume_te(found, job, config)
    found.refused = list(dict.fromkeys(found.refused))
    if job.loop == BRIDGE_LOOP:
        return Preflight(**_in_bridges_names(vars(found)))
    return found


def _in_bridges_names(value: Any) -> Any:
    """Return a value of the record with Bridge's names of settings in all its texts."""
    if isinstance(value, str):
        return in_bridges_names(value)
    if isinstance(value, list | tuple):
        return [_in_bridges_names(each) for each in value]
    if isinstance(value, dict):
        return {_in_bridges_names(key): _in_bridges_names(each) for key, each in value.items()}
    return value


def _layout(job: BuiltJob) -> dict[str, int]:
    args = job.args
    top = job.stages[0].topology
    chunks = len(job.stages[0].chunks)
    has_experts = bool(getattr(args, "num_experts", None))
    sizes = {
        "ranks": job.num_ranks,
        "TP": top.tp.size,
        "PP": top.num_stages,
        "VPP": chunks,
        "CP": top.context,
        "EP": int(getattr(args, "expert_model_parallel_size", None) or 1) if has_experts else 1,
        "ETP": top.expert_tp.size if has_experts else 1,
        "DP": top.data.size // top.context,
    }
    return {name: size for name, size in sizes.items() if size > 1 or name in ("ranks", "DP")}


def _check_flags(found: Preflight, config: SnipConfig, both: list[Namespace]) -> SnipConfig:
    """Note the job's settings that SNIP knows; return the settings under them.

    Args:
        found: gets them.
        config: SNIP's settings.
        both: the job's settings, as given and as the built model runs them. A job checks both.
    """
    rows = {}
    for args in both:
        with_backend = Namespace(**{**vars(args), "snip_backend": config.backend})
        for row in (*INCOMPATIBLE_FLAGS, *FAST_FLAGS):
            if row.is_on(with_backend):
                rows[row.flag] = row
    if TE_IS_MISSING.flag in rows:  # of this machine, and not of the job's
        del rows[TE_IS_MISSING.flag]
        found.unknown.append(
            "Transformer Engine is not installed here: linears are those of Megatron's own layers, "
            "and which options each can run is not known"
        )
    for row in rows.values():
        found.flags.append({"flag": row.flag, "effect": row.plans, "text": row.text})
        if row.refusal is not None:
            found.refused.append(row.refusal)
    if any(row.refusal for row in rows.values()):
        return config
    for args in both:
        values = dict(vars(args))
        if "transformer_impl" in values and not have_te():
            values["transformer_impl"] = ""
        config = with_flags_of_the_job(config, Namespace(**values))
    return config


def _note(found: Preflight, action: Callable[[], Any]) -> Any:
    """Return what a check of the job returns; note what it refuses, and return None."""
    try:
        return action()
    except UnsupportedError as error:
        found.refused += error.messages
    except UsageError as error:
        found.refused.append(_text(error))
    except InfeasiblePlanError as error:
        found.refused.append(str(error))
    return None


def _text(error: UsageError) -> str:
    name = "" if error.field is None else f"{flag_name(PREFIX, error.field)}: "
    return f"{name}{error.message}"


def _models(found: Preflight, job: BuiltJob, config: SnipConfig) -> list[PlannedModel] | None:
    """Return the planned linears of each stage, and note them."""
    # Linears of Megatron's own layers stand for Transformer Engine's.
    backend = "auto" if job.lacks_te and config.backend == "te" else config.backend
    seed = int(getattr(job.args, "seed", 0))
    tokens = tokens_of(job.args, get_model_config(job.stages[0].chunks[0]))

    def planned(stage: Stage) -> PlannedModel:
        return PlannedModel(stage.chunks, stage.topology, seed, backend, tokens)

    models: list[PlannedModel] | None = _note(found, lambda: on_all(job.stages, planned))
    if not models:
        return None
    linears = models[0].job.linears
    found.backend = models[0].job.backend
    found.machine = str(models[0].job.machine)
    if models[0].job.machine.te_version is not None:
        found.machine += f", Transformer Engine {models[0].job.machine.te_version}"
    of_experts = [each for each in linears if each.is_of_experts]
    on_stage = Counter(each.stage for each in linears)
    found.linears = {
        "all": len(linears),
        "of experts": len(of_experts),
        "experts": max(models[0].job.num_experts.values(), default=0),
        "by stage": {stage: on_stage[stage] for stage in range(len(job.stages))},
        "parameters of a rank": [
            sum(p.numel() for chunk in stage.chunks for p in chunk.parameters())
            for stage in job.stages
        ],
        "sharded by FSDP": _is_sharded(job.args),
    }
    flops = {each.name: each.flops_per_token for each in linears}
    shares: dict[str, float] = {}
    for name, option in models[0].job.options.items():
        shares[str(option)] = shares.get(str(option), 0.0) + flops[name]
    total = sum(shares.values())
    found.job = {option: share / total for option, share in shares.items()}
    return models


def _is_sharded(args: Namespace) -> bool:
    """Return whether each data rank holds a part of every parameter that it builds."""
    if getattr(args, "use_torch_fsdp2", False):
        return True
    strategy = getattr(args, "data_parallel_sharding_strategy", "no_shard")
    return bool(getattr(args, "use_megatron_fsdp", False)) and strategy == "optim_grads_params"


def _plan(found: Preflight, job: BuiltJob, config: SnipConfig, models: list[PlannedModel]) -> None:
    """Note what plans choose from and reach, and what refuses every plan."""
    of_stage = {id(stage): model for stage, model in zip(job.stages, models, strict=True)}
    train_iters = getattr(job.args, "train_iters", None)
    found.only_measures = config.collect_only

    def planned(stage: Stage) -> RunPlans:
        return RunPlans(config, of_stage[id(stage)], train_iters, None)

    every: list[RunPlans] | None = _note(found, lambda: on_all(job.stages, planned))
    if every is None:
        return
    plans, model = every[0], models[0]
    available = plans.available
    found.formats = list(plans.config.formats)
    found.formats_why = available.formats_why
    if model.job.backend == "te":
        names = plans.config.named_formats
        found.recipes = {name: te_support(name, model.job.machine)[1] for name in names}
    found.fixed = by_source(available.fixed)
    found.warnings += available.warnings
    found.hints += available.hints
    _note(found, lambda: _targets(found, plans, model))
    problem = plans.available.problem_without_measurements(found.target.get("runs") or 0.0)
    found.problem = problem.to_dict()
    found.measuring = costs.measuring(job, plans.config)
    found.control_s = costs.control_seconds(len(model.job.linears), job.num_ranks)
    options = available.options
    if not found.only_measures and len(options) > 1:
        highest, lowest = options[0], options[-1]
        target = found.target.get("runs") or 0.0
        found.memory_gib = costs.memory_gib(job, models, (highest, lowest), target)
    of_plans = {id(stage): each for stage, each in zip(job.stages, every, strict=True)}
    _note(found, lambda: on_all(job.stages, lambda stage: of_plans[id(stage)].first_plan(None, 0)))
    refusals = on_all(
        job.stages,
        lambda stage: of_stage[id(stage)].evaluation_refusals(available.options),
    )[0]
    if refusals and config.eval_precision != "bf16":
        found.warnings.append(f"evaluations cannot run every plan: {'; '.join(refusals)}")


def _assume_te(found: Preflight, job: BuiltJob, config: SnipConfig) -> None:
    """Replace what was found of Megatron's own layers by what the GPU alone decides."""
    machine = Machine(
        torch.cuda.get_device_capability(), "not installed here", job=JobPrecision.of(job.args)
    )
    found.machine, found.backend = str(machine), "te"
    # What Megatron's own layers run is not what the job's run.
    found.job = {}
    found.target = {}
    found.memory_gib = {}
    found.problem = {}
    found.recipes = {}
    found.formats = []
    found.formats_why = ""
    found.warnings = []
    if config.formats == (AUTO,):
        formats = _note(found, lambda: te_formats(machine))
        found.formats = list(formats or ())[-2:]
        found.recipes = {name: te_support(name, machine)[1] for name in found.formats}


def _targets(found: Preflight, plans: RunPlans, model: PlannedModel) -> None:
    """Note which targets plans reach, and which one the run has."""
    config = plans.config
    if config.collect_only or not get_policy(config.policy).heeds_target:
        return
    problem = plans.available.problem_without_measurements(1.0)
    least, best = reachable_range(config, problem, plans.available)
    total = sum(each.flops_per_token for each in model.job.linears)
    in_job = 0.0
    for each in model.job.linears:
        option = model.job.options.get(each.name, BF16)
        in_job += option.share_in(config.lowest_format) * each.flops_per_token / total
    runs = max(point.target for point in plans.targets.points)
    found.target |= {"runs": runs, "least": least, "best": best, "job": in_job}
