"""The plan that a run starts with, and the options and targets of all its plans.

The first plan comes from one of four sources. The first of these five rules that applies counts:

    1. collect_only      FILE if there is a plan file, else JOB
    2. a plan file       FILE, unless the stopped run was given a file with the same plan
    3. the policy        POLICY if it needs no measurement. (A resumed run whose target changes,
                         with unchanged settings of the plan, continues with its plan: rule 4)
    4. a checkpoint      CHECKPOINT; if settings of the plan changed, the policy plans from the
                         checkpoint's measurements before the first iteration
    5. otherwise         JOB

Then it is made to fit the settings and the linears of this run (fitting.py).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError, naming_field
from megatron_snip.formats import get_format
from megatron_snip.linears.availability import AvailableOptions, available_options
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.timed_options import timed_options
from megatron_snip.options import BF16, Option
from megatron_snip.planning.plan import (
    PrecisionPlan,
    assigned_plan,
    format_shares,
    read_plan,
    without_objective,
)
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import UNIFORM, get_policy
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.run.feasibility import check_settings, reachable_target
from megatron_snip.run.fitting import Replacement, describe, fitted_plan, fitted_problem
from megatron_snip.run.healing import healing_targets, scheduled_targets
from megatron_snip.run.plan_file import check_plan_file, recipe_changes
from megatron_snip.run.schedule import Schedule
from megatron_snip.run.solve import plan_from_rank_0
from megatron_snip.run.state import RunState, changed_plan_settings, reported_settings
from megatron_snip.target_schedule import TargetSchedule


class PlanSource(Enum):
    """Where the plan that a run starts with comes from."""

    FILE = auto()
    """`--snip-plan-file`."""

    POLICY = auto()
    """The policy, which needs no measurement."""

    CHECKPOINT = auto()
    """The stopped run."""

    JOB = auto()
    """What the job itself runs, BF16 or its own recipe, with the pins."""


@dataclass(frozen=True)
class FirstPlan:
    """The plan that a run starts with, or resumes with.

    Attributes:
        plan: a plan that fits the model and the settings.
        source: where it comes from.
        changes: one text for each kind of change that made it fit.
        new_settings: names of the settings that decide the plan and that differ from those of the
            stopped run; the plan file is left out.
    """

    plan: PrecisionPlan
    source: PlanSource
    changes: tuple[str, ...] = ()
    new_settings: frozenset[str] = frozenset()

    @property
    def is_outdated(self) -> bool:
        """Whether the plan is a checkpoint's, made under other settings than this run's."""
        return self.source is PlanSource.CHECKPOINT and bool(self.new_settings)


class RunPlans:
    """The first plan of a run, and the options, targets and times of all its plans.

    Every method but `recipe_changes` returns the same on all ranks.

    Attributes:
        config: the settings, with the formats that `auto` means. Where the user gave no target, it
            has a share of the target that the linears can reach.
        available: what the linears can run, and what is fixed.
        file_digest: digest of the plan in the plan file; None without one.
        targets: the efficiency target of every iteration, by the settings; `targets_of` has those
            of a run that heals because of its noise.
        schedule: when the run measures and plans.
        train_iters: the last iteration of the run; None if it is not known.
    """

    def __init__(
        self,
        config: SnipConfig,
        model: PlannedModel,
        train_iters: int | None,
        calibration_cache: Path | None,
    ) -> None:
        """All ranks: find what the linears can run, and what the target is.

        Args:
            config: the settings.
            model: the planned linears.
            train_iters: the last iteration of the run; healing needs it.
            calibration_cache: a file of rank 0 that stores measured seconds for a resumed run.

        Raises:
            UsageError: on every rank, if healing does not fit the run, or the plan file cannot be
                read.
            UnsupportedError: on every rank, if the model cannot run the options, or the target
                cannot count seconds.
        """
        self._control = model.runtime.topology.control
        self._file_plan: PrecisionPlan | None = None
        if config.plan_file is not None:
            with naming_field("plan_file"):
                read = partial(read_plan, config.plan_file)
                self._file_plan = plan_from_rank_0(read, self._control)
        self.file_digest = None if self._file_plan is None else self._file_plan.digest
        # The order counts: `auto` formats first, then what runs them, then what of it is faster
        # than BF16; only then is it known which target can be reached.
        config, available = available_options(config, model.job, model.refusals_of)
        if config.cost == "time" and not config.collect_only:
            available = timed_options(available, model, config, calibration_cache)
        self.config, about_target = reachable_target(config, available)
        self.available: AvailableOptions = replace(
            available, warnings=(*available.warnings, *about_target)
        )
        self.targets = scheduled_targets(self.config, train_iters)
        if config.heal_below_noise is not None and not get_policy(config.policy).needs_statistics:
            raise UsageError(
                f"the policy '{config.policy}' measures no noise; use --snip-heal-from",
                field="heal_below_noise",
            )
        self.schedule = Schedule(self.config)
        self.train_iters = train_iters
        self._model = model

    def targets_of(self, state: RunState | None) -> TargetSchedule:
        """Return the target of every iteration, also where the state of the run began to heal."""
        if state is None or state.heal_from is None or self.config.heal_below_noise is None:
            return self.targets
        assert self.train_iters is not None  # `scheduled_targets` has checked it
        return healing_targets(self.config, self.targets, state.heal_from, self.train_iters)

    # ---- the first plan -------------------------------------------------------------------------

    def first_plan(self, state: RunState | None, seed: int, num_done: int = 0) -> FirstPlan:
        """All ranks: return the plan that the run starts with, or resumes with.

        Args:
            state: the state of the stopped run; None for a new run.
            seed: seed of the policies `random` and `random-gemm`.
            num_done: iterations that the weights were trained for.

        Raises:
            UsageError: on every rank, if the policy is unknown, a plan or pin does not fit the
                model, no plan reaches the target, or the plan file contradicts another setting.
        """
        changed = frozenset[str]()
        if state is not None:
            changed = changed_plan_settings(state, self._recorded_config, self._digests)
        new_settings = changed - {"plan_file"}  # it has a rule of its own (2)
        has_new_file = self._file_plan is not None and (state is None or "plan_file" in changed)
        source = self._source(state, new_settings, has_new_file)

        def make() -> PrecisionPlan:
            # Rank 0. Whatever the source: a target that no plan reaches ends the job now, and not
            # at its first refresh.
            highest = max(point.target for point in self.targets.points)
            settings = self.plan_settings(seed)
            problem = self.available.problem_without_measurements(highest)
            check_settings(problem, self.config, settings, self.available)
            match source:
                case PlanSource.FILE:
                    assert self._file_plan is not None
                    with naming_field("plan_file"):
                        self._file_plan.check_against(self._model.job.stage_and_flops)
                    return self._file_plan
                case PlanSource.CHECKPOINT:
                    assert state is not None
                    return state.plan
                case PlanSource.JOB:
                    return self._job_plan(settings, num_done + 1)
                case PlanSource.POLICY:
                    return self._policy_plan(settings, num_done + 1)

        plan, replaced = self.fitted(plan_from_rank_0(make, self._control))
        if source is PlanSource.FILE:
            check_plan_file(replaced, self.config, len(plan.linears))
        # A plan's file is named by its iteration. The number of another run's plan could be that of
        # a later plan of this run, so a plan that is new here gets a new number.
        number = num_done
        if state is not None and plan.digest == state.plan.digest:
            number = state.plan.iteration
        plan = plan.model_copy(update={"iteration": number})
        changes = tuple(describe(replaced, len(plan.linears)))
        return FirstPlan(plan, source, changes, new_settings)

    def _source(
        self, state: RunState | None, new_settings: frozenset[str], has_new_file: bool
    ) -> PlanSource:
        """Return where the first plan comes from: the first rule of the module's list that applies.

        Args:
            state: the state of the stopped run, or None.
            new_settings: settings of the plan that differ from those of the stopped run; the plan
                file is left out.
            has_new_file: whether there is a plan file that the stopped run was not given.
        """
        config = self.config
        if config.collect_only:  # rule 1
            return PlanSource.JOB if self._file_plan is None else PlanSource.FILE
        if has_new_file:  # rule 2
            return PlanSource.FILE
        if not get_policy(config.policy).needs_statistics:  # rule 3
            # If the target changes, the stopped run may have planned since its start: its plan is
            # then newer than what the policy gives for the first iteration.
            may_have_planned_since = state is not None and config.target_changes
            if not may_have_planned_since or new_settings:
                return PlanSource.POLICY
        # Rules 4 and 5.
        return PlanSource.JOB if state is None else PlanSource.CHECKPOINT

    def plan_settings(self, seed: int) -> PlanSettings:
        """Return the rules under which plans are made."""
        settings = PlanSettings.of(self.config, pins=self.available.pins, seed=seed)
        if self.config.collect_only:  # nothing measures the seconds that the cost `time` counts
            return settings.model_copy(update={"cost": "flops"})
        return settings

    def _policy_plan(self, settings: PlanSettings, iteration: int) -> PrecisionPlan:
        """Return the plan of a policy that needs no measurement, for an iteration's target."""
        problem = self.available.problem_without_measurements(self.targets.at(iteration))
        with naming_field("policy"):
            return without_objective(make_plan(problem, settings))

    def _job_plan(self, settings: PlanSettings, iteration: int) -> PrecisionPlan:
        """Return the plan that changes nothing but what a pin sets."""
        if set(self.available.job.options.values()) == {BF16}:
            # BF16 with the pins is a policy of its own, and the plan has its name.
            in_bf16 = settings.model_copy(update={"policy": f"{UNIFORM}bf16"})
            return self._policy_plan(in_bf16, iteration)
        fixed = {name: each.option for name, each in self.available.fixed.items()}
        linears = {**self.available.job.options, **fixed}
        return self._assigned(linears, "job", iteration=0)

    # ---- plans and problems of another run ------------------------------------------------------

    def fitted(self, plan: PrecisionPlan) -> tuple[PrecisionPlan, list[Replacement]]:
        """All ranks: return a plan as this run allows it, and what had to change."""
        return fitted_plan(plan, self.config, self.available, self._model.refusals_of)

    def fitted_problem(self, problem: PlanningProblem) -> PlanningProblem:
        """All ranks: return a former run's problem with the stages and options of this run."""
        return fitted_problem(problem, self.config, self.available, self._model.refusals_of)

    # ---- later plans ----------------------------------------------------------------------------

    def job_fallback(self, plan: PrecisionPlan, iteration: int) -> PrecisionPlan:
        """Return what the guard falls back to where no other plan is left: what the job runs.

        Args:
            plan: the current plan; fixed linears stay as they are in it.
            iteration: the first iteration of the fallback.
        """
        linears = {}
        for name, option in plan.linears.items():
            fixed = self.available.fixed.get(name)
            is_ruled = fixed is not None and fixed.source.is_rule
            linears[name] = option if is_ruled else self.available.job.options[name]
        return self._assigned(linears, "guard", iteration)

    def _assigned(
        self, linears: Mapping[str, Option], policy: str, iteration: int
    ) -> PrecisionPlan:
        return assigned_plan(
            linears,
            self._model.job.stage_and_flops,
            lowest_format=self.config.lowest_format,
            policy=policy,
            iteration=iteration,
            stage_layers=self.available.job.stage_layers,
        )

    # ---- what differs from another run ----------------------------------------------------------

    def reported_settings(self) -> dict[str, str]:
        """Return what a resumed run reports if it changed (`state.reported_settings`)."""
        recipes = self._model.recipes(self.config.named_formats)
        backend = str(self._model.job.backend)
        return reported_settings(self._recorded_config, backend, recipes, self._digests)

    @property
    def _digests(self) -> dict[str, str]:
        """Digests of what the files hold that settings name, by setting."""
        digests = {} if self.file_digest is None else {"plan_file": self.file_digest}
        table = self.available.calibration
        if table is not None and self.config.calibration is not None:
            text = table.model_dump_json()
            digests["calibration"] = hashlib.sha256(text.encode()).hexdigest()
        return digests

    @property
    def _recorded_config(self) -> SnipConfig:
        """The settings with all that is fixed as pins: the job's rules may change at a resume."""
        pins = tuple(f"{glob}={option}" for glob, option in self.available.pins)
        return self.config.model_copy(update={"pins": pins})

    def recipe_changes(self) -> list[str]:
        """Rank 0: return a line for each option that ran by another recipe in the file's run.

        Empty on other ranks, and without a plan file.
        """
        if self.config.plan_file is None or self._model.runtime.topology.rank != 0:
            return []
        assert self.file_digest is not None
        return recipe_changes(self.config.plan_file, self.file_digest, self._model)

    # ---- numbers of a plan ----------------------------------------------------------------------

    def lowest_precision_share(self, plan: PrecisionPlan) -> float:
        """Return the share of the linears' FLOPs in the lowest precision under a plan.

        metrics.jsonl calls it `lowest_precision_fraction`. With `--snip-cost flops` the target
        counts the same share, which is then the plan's `efficiency`.
        """
        bits = get_format(self.config.lowest_format).bits
        shares = format_shares(plan.linears, self._model.job.stage_and_flops).items()
        return sum(share for name, share in shares if get_format(name).bits == bits)

    def saving_s(self, plan: PrecisionPlan, num_microbatches: int) -> float | None:
        """Return the seconds that a plan saves in each step against BF16.

        It is the time of the linears of the slowest stage in BF16, minus that of the slowest stage
        under the plan, which can be another one. Pipeline bubbles do not count. None without
        `--snip-cost time`, or if the tokens of a microbatch vary.
        """
        table = self.available.calibration
        tokens = self._model.microbatch_tokens
        if table is None or tokens is None:
            return None
        bf16 = dict.fromkeys(plan.linears, BF16)
        before = table.slowest_stage(bf16, self._model.job.stage_and_flops)
        after = table.slowest_stage(plan.linears, self._model.job.stage_and_flops)
        megatron = self._model.config
        # The table has the seconds that one GPU needs for all tokens and features of a microbatch.
        # Context- and tensor-parallel ranks share them; each data-parallel rank has microbatches
        # of its own.
        ranks = int(megatron.context_parallel_size * megatron.tensor_model_parallel_size)
        return (before - after) * tokens * num_microbatches / ranks
