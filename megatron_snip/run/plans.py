"""The plans of a run: the first one, plans from elsewhere, healing, and what the linears can run.

The plan that a run starts with comes from one of five places; the first that applies counts:

    1. collect_only          the plan file, or what the job runs
    2. a plan file           unless the stopped run was given the same one
    3. the policy            if it needs no measurement (again at a resume, unless there is a
                             schedule of targets and the settings are those of the stopped run)
    4. the checkpoint        and if settings of the plan changed, the policy plans from the
                             checkpoint's measurements before the first iteration
    5. what the job runs: BF16, or the low precision that it has by default

Wherever a plan comes from, the settings as given now hold: a pinned linear gets its option, and no
linear gets a format that is not among the formats, nor an option that it cannot run. A plan file
that breaks a pin or the formats is an error, because both were given in the same command.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import unmeasured_problem
from megatron_snip.errors import InfeasiblePlanError, UsageError, listing, naming_field
from megatron_snip.files import read_json
from megatron_snip.formats import get_format
from megatron_snip.linears.availability import AvailableOptions, available_options, option_refusals
from megatron_snip.linears.calibrate import timed_options
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import BF16, Option
from megatron_snip.planning.constraints import make_constraints
from megatron_snip.planning.cost import TOLERANCE, make_table
from megatron_snip.planning.plan import (
    PrecisionPlan,
    assigned_plan,
    format_shares,
    read_plan,
    without_objective,
)
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import UNIFORM, get_policy
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem, parse_option
from megatron_snip.planning.restrictions import Refusals, bits_of, nearest_option, reasons
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.ties import merged
from megatron_snip.run.solve import PendingProblem, plan_from_rank_0
from megatron_snip.run.state import ControllerState, changed_plan_settings
from megatron_snip.types import Gemm


@dataclass(frozen=True)
class Replacement:
    """A linear whose option in a plan from elsewhere does not hold in this run.

    Attributes:
        linear: name of the linear.
        old: its option in the plan.
        new: the option that it gets.
        reason: the flag that rules the old one out, or why the linear cannot run it.
        is_setting: whether `reason` is a flag.
    """

    linear: str
    old: Option
    new: Option
    reason: str
    is_setting: bool


@dataclass(frozen=True)
class FirstPlan:
    """The plan that a run starts with, or resumes with.

    Attributes:
        plan: a plan that fits the model and the settings.
        changes: one text for each kind of change that made it fit.
        replans: whether the policy is to plan from the checkpoint's measurements before the first
            iteration, because settings of the plan changed.
        continues: whether what the stopped run was solving still counts.
    """

    plan: PrecisionPlan
    changes: tuple[str, ...] = ()
    replans: bool = False
    continues: bool = False


class RunPlans:
    """The options and targets of this run's plans; every method returns the same on all ranks.

    Attributes:
        available: what the linears can run.
        config: the settings; without a target of the user's, with the highest that is reachable.
        targets: the efficiency target of every iteration.
        work: (stage, FLOPs per token) by linear.
    """

    def __init__(
        self,
        config: SnipConfig,
        model: PlannedModel,
        train_iters: int | None,
        calibration_cache: Path | None,
    ) -> None:
        """All ranks; it raises what `SnipController` does."""
        self.work = {i.name: (i.stage, i.flops_per_token) for i in model.all_linears}
        self.available: AvailableOptions = available_options(model, config)
        if config.cost == "time" and not config.collect_only:
            self.available = timed_options(self.available, model, config, calibration_cache)
        self._config = config
        self._model = model
        self._control = model.runtime.topology.control
        self.config = self._config = self._reachable(config)
        self.targets = self.config.targets(train_iters)

    def first_plan(self, state: ControllerState | None, seed: int) -> FirstPlan:
        """All ranks: return the plan that the run starts with, or resumes with.

        Raises:
            UsageError: on every rank, if the policy is unknown, a plan or pin does not fit the
                model, no plan reaches the target, or the plan file contradicts another setting.
        """
        config = self._config
        changed = frozenset() if state is None else changed_plan_settings(state, config)
        is_new_file = state is None or "plan_file" in changed
        from_file = config.plan_file is not None and (config.collect_only or is_new_file)
        changed -= {"plan_file"}
        is_static = not get_policy(config.policy).needs_statistics
        plans_again = is_static and (not config.has_schedule or bool(changed))
        resumed = None
        if state is not None and not (from_file or plans_again or config.collect_only):
            resumed = state.plan
        num_done = 0 if state is None else state.iteration
        largest = max(point.target for point in self.targets.points)

        def make() -> PrecisionPlan:
            problem = self.unmeasured(largest)
            check_settings(problem, config, seed)
            if resumed is not None:
                return resumed
            if from_file:
                assert config.plan_file is not None
                with naming_field("plan_file"):
                    plan = read_plan(config.plan_file)
                    plan.check_against(problem.names)
                    return plan
            starts_as_the_job = config.collect_only or get_policy(config.policy).needs_statistics
            if starts_as_the_job and set(self.available.job.values()) != {BF16}:
                return self._job_plan()
            return policy_plan(problem, config, seed, self.targets.at(num_done + 1))

        plan = plan_from_rank_0(make, self._control)
        plan, replaced = self.fitted(plan)
        if from_file:
            self._check_file(replaced)
        if state is not None and plan.digest != state.plan.digest:
            # Its file must not replace that of another plan of the stopped run.
            plan = plan.model_copy(update={"iteration": num_done})
        return FirstPlan(
            plan,
            tuple(describe(replaced, len(self.work))),
            replans=resumed is not None and bool(changed),
            continues=resumed is not None and not changed,
        )

    def fitted(self, plan: PrecisionPlan) -> tuple[PrecisionPlan, list[Replacement]]:
        """All ranks: return a plan as the settings and the linears of this run allow it.

        Args:
            plan: a plan of the same linears, from anywhere.

        Raises:
            UsageError: if it is a plan of other linears.
        """
        plan.check_against(self.work)
        pins = {option for _, option in self._config.pin_pairs}
        candidates = (*plan.linears.values(), *self.available.options, *pins, BF16)
        refusals = option_refusals(self._model, candidates)
        replaced = []
        for name, old in plan.linears.items():
            pin = self._config.pin_of(name)
            can_run = [o for o in self.available.options if name not in refusals[o]]
            new = old if pin is None else pin
            reason = "--snip-pins"
            is_setting = True
            if name in refusals[new]:
                reason = refusals[new][name]
                is_setting = False
                new = nearest_option(new, can_run)
                new = self.available.job[name] if name in refusals[new] else new
            elif pin is None and not self._config.allows(old) and old != self.available.job[name]:
                reason = "--snip-formats"
                new = nearest_option(old, can_run)
            if new != old:
                replaced.append(Replacement(name, old, new, reason, is_setting))
        linears = {**plan.linears, **{each.linear: each.new for each in replaced}}
        replaced += self._untied(linears, refusals)
        if not replaced:
            return plan, []
        linears |= {each.linear: each.new for each in replaced}
        lowest = self._config.lowest_format
        return assigned_plan(linears, self.work, lowest, plan.policy, plan.iteration), replaced

    def _untied(self, linears: Mapping[str, Option], refusals: Refusals) -> Iterator[Replacement]:
        """Yield the replacements that give tied linears one option, of the most bits."""
        for names in self.available.ties:
            options = dict.fromkeys(linears[name] for name in names)
            if len(options) == 1:
                continue
            finest = max(options, key=lambda option: sum(bits_of(option)))
            candidates = (*options, *self.available.options)
            can_run = [o for o in candidates if not any(n in refusals[o] for n in names)]
            new = nearest_option(finest, can_run)
            for name in names:
                if linears[name] != new:
                    why = "its operations are fused with those of another linear"
                    yield Replacement(name, linears[name], new, why, is_setting=False)

    def _check_file(self, replaced: Sequence[Replacement]) -> None:
        """Refuse a plan file that contradicts the pins or formats of the same command."""
        for flag in ("--snip-pins", "--snip-formats"):
            names = [each.linear for each in replaced if each.reason == flag]
            if names:
                given = self._config.pins if flag == "--snip-pins" else self._config.named_formats
                raise UsageError(
                    f"the plan breaks {flag} ({','.join(given)}) at {len(names)} of "
                    f"{len(self.work)} linears: {listing(names, 3)}; change one of the two",
                    field="plan_file",
                )

    def lowest_precision_share(self, plan: PrecisionPlan) -> float:
        """Return the share of the linears' FLOPs in the lowest precision under a plan."""
        bits = get_format(self._config.lowest_format).bits
        shares = format_shares(plan.linears, self.work).items()
        return sum(share for name, share in shares if get_format(name).bits == bits)

    def fallback(self, plan: PrecisionPlan, iteration: int) -> PrecisionPlan:
        """Return the guard's last fallback: what the job runs; pins hold as in `plan`."""
        c = self._config
        job = self.available.job
        linears = {n: job[n] if c.pin_of(n) is None else o for n, o in plan.linears.items()}
        return assigned_plan(linears, self.work, c.lowest_format, "guard", iteration)

    def _job_plan(self) -> PrecisionPlan:
        """Return the plan that changes nothing but what a pin sets."""
        c = self._config
        linears = {name: c.pin_of(name) or option for name, option in self.available.job.items()}
        return assigned_plan(linears, self.work, c.lowest_format, "job").model_copy(
            update={"objective": None, "bound": None}
        )

    def _reachable(self, config: SnipConfig) -> SnipConfig:
        """Return the settings with a default target that the linears can reach."""
        asked = {"efficiency_target", "target_schedule"} & config.model_fields_set
        if asked or config.collect_only:
            return config
        config = self._scaled_to_options(config)
        problem = self.unmeasured(config.efficiency_target)
        settings = PlanSettings(**config.planning_values())
        try:
            check_constraints(problem, settings.model_copy(update={"pins": ()}))
            return config  # or pins rule the target out, which `check_settings` reports
        except InfeasiblePlanError as error:
            best = error.best_target
            if best is None or best >= config.efficiency_target:
                return config
            found = math.floor(best * 1e6) / 1e6
            reason = (
                f"the highest that these linears can reach, and not {config.efficiency_target:g}"
            )
            return self._with_target(config, found, reason)

    def _scaled_to_options(self, config: SnipConfig) -> SnipConfig:
        """Return the settings with the default target as a share of what the options can lower.

        Where every option has a GEMM in higher precision, the target in a plan's FLOPs would
        otherwise be out of reach, or leave the planner no choice.
        """
        lowest = config.lowest_format
        share = max(option.share_in(lowest) for option in self.available.options)
        if config.cost == "time" or share == 1.0:
            return config
        default = config.efficiency_target
        reason = f"{default:g} of the {share:.3g} that the options can lower to {lowest}"
        return self._with_target(config, round(default * share, 6), reason)

    def _with_target(self, config: SnipConfig, target: float, reason: str) -> SnipConfig:
        """Return the settings with another target than the default, and warn of it."""
        text = (
            f"the efficiency target is {target:g}, {reason}; --snip-efficiency-target sets another"
        )
        self.available = replace(self.available, warnings=(*self.available.warnings, text))
        return config.model_copy(update={"efficiency_target": target})

    def unmeasured(self, target: float) -> PlanningProblem:
        """Return the problem before any measurement: all quality losses are 0."""
        linears = self._model.all_linears
        lowest = self._config.lowest_format
        problem = unmeasured_problem(linears, self.available.options, lowest, target)
        return self.available.restrict(problem)

    def adapted_problem(self, problem: PlanningProblem) -> PlanningProblem:
        """All ranks: return a former run's problem with the stages and options of this run.

        Raises:
            UsageError: if it is a problem of other linears.
        """
        if set(problem.names) != set(self.work):
            raise UsageError("the planning problem in the checkpoint is that of another model")
        rows = tuple(
            row.model_copy(update={"stage": self.work[row.name][0]}) for row in problem.linears
        )
        options = dict.fromkeys(Option.parse(name) for row in rows for name in row.options)
        refusals = option_refusals(self._model, options)
        problem = problem.model_copy(update={"linears": rows})
        pins = {option for _, option in self._config.pin_pairs}

        def allowed(row: LinearChoices) -> dict[str, OptionCost]:
            named = ((parse_option(text), text, cost) for text, cost in row.options.items())
            return {t: cost for o, t, cost in named if self._config.allows(o) or o in pins}

        problem = problem.with_options(allowed)
        return replace(self.available, refusals=refusals).restrict(problem)

    def adapted_pending(self, pending: PendingProblem, num_done: int) -> PendingProblem:
        """All ranks: return a stopped run's pending problem as this run solves it.

        Args:
            pending: the problem that was being solved.
            num_done: iterations that are done; the plan is due after them, and not later than
                this run's lag allows.

        Raises:
            UsageError: if it is a problem of other linears.
        """
        apply_at = min(pending.apply_at, pending.iteration + self._config.lag)
        problem = self.adapted_problem(pending.problem)
        return PendingProblem(pending.iteration, max(apply_at, num_done + 1), problem)

    def restrict_for_healing(
        self, problem: PlanningProblem, plan: PrecisionPlan, apply_at: int
    ) -> PlanningProblem:
        """Return the problem without the options that healing rules out at `apply_at`.

        Healing from `plan` on with heal_order `forward` or `backward` does; see `healing_problem`.
        """
        heal_from = self.targets.heal_from
        if heal_from is None or apply_at < heal_from or self._config.heal_order == "plan":
            return problem
        return healing_problem(problem, plan, self._config)

    def saving_s(self, plan: PrecisionPlan, num_microbatches: int) -> float | None:
        """Return the seconds that a plan saves of a step against BF16.

        It is the time of the slowest stage's linears in BF16 minus that under the plan, without
        pipeline bubbles. None without `--snip-cost time`, or if the tokens of a microbatch vary.
        """
        table = self.available.calibration
        tokens = self._model.runtime.microbatch_tokens
        if table is None or tokens is None:
            return None
        bf16 = dict.fromkeys(plan.linears, BF16)
        before = table.slowest_stage(bf16, self.work)
        after = table.slowest_stage(plan.linears, self.work)
        megatron = self._model.config
        ranks = int(megatron.context_parallel_size * megatron.tensor_model_parallel_size)
        return (before - after) * tokens * num_microbatches / ranks


def check_settings(problem: PlanningProblem, config: SnipConfig, seed: int) -> None:
    """Refuse, before the first iteration, settings under which no plan can be made.

    Args:
        problem: what every linear can run, at the highest target of the run.
        config: the run's settings.
        seed: seed of the policy `random`.

    Raises:
        UsageError: if the policy is unknown or has no target to schedule, a pin does not fit the
            model, or the plan file would never run.
        InfeasiblePlanError: if the constraints cannot be met.
    """
    with naming_field("policy"):
        policy = get_policy(config.policy, problem)
        if config.has_schedule and not policy.heeds_target:
            raise UsageError(f"'{config.policy}' has no target; drop it or the schedule of targets")
    makes_plans = not config.collect_only
    if config.plan_file is not None and makes_plans and not policy.needs_statistics:
        raise UsageError(
            f"'{config.policy}' plans before the first iteration, so the plan file would not run; "
            "drop one of them, or add --snip-collect-only to train with the file",
            field="plan_file",
        )
    settings = PlanSettings(**config.planning_values(), seed=seed)
    if not makes_plans:  # then nothing measures the seconds that the cost `time` counts
        settings = settings.model_copy(update={"cost": "flops"})
    feasible = makes_plans and (config.has_schedule or policy.needs_statistics)
    with naming_field("pins"):
        check_constraints(problem, settings, feasible)


def check_constraints(
    problem: PlanningProblem, settings: PlanSettings, feasible: bool = True
) -> None:
    """Refuse pins that do not fit a problem, and constraints that no plan satisfies.

    Args:
        problem: what every linear can run.
        settings: pins, balance and cost.
        feasible: whether a plan must exist.

    Raises:
        UsageError: if a pin does not fit.
        InfeasiblePlanError: if the constraints cannot be met.
    """
    problem, settings = merged(problem, settings)
    constraints = make_constraints(
        make_table(problem, settings.cost), settings, problem.target, None
    )
    if feasible:
        constraints.checked_task()


def policy_plan(
    problem: PlanningProblem, config: SnipConfig, seed: int, target: float
) -> PrecisionPlan:
    """Return the policy's plan without measurements; that of a policy that needs them is BF16.

    Args:
        problem: what every linear can run; quality losses are not used.
        config: the run's settings; pinned linears have their option.
        seed: seed of the policy `random`.
        target: the efficiency target of the first iteration.
    """
    settings = PlanSettings(**config.planning_values(), seed=seed).model_copy(
        update={"target": target}
    )
    if config.collect_only:
        settings = settings.model_copy(update={"cost": "flops"})
    if config.collect_only or get_policy(config.policy).needs_statistics:
        settings = settings.model_copy(update={"policy": f"{UNIFORM}bf16"})
    with naming_field("policy"):
        return without_objective(make_plan(problem, settings))


def healing_problem(
    problem: PlanningProblem, plan: PrecisionPlan, config: SnipConfig
) -> PlanningProblem:
    """Return a problem whose plans lower no GEMM of `plan`, and raise some GEMMs before the others.

    Options are left out. While the target is above the share of the GEMMs that come second, these
    stay as in `plan`. Below it, the GEMMs that come first stay above the lowest precision. Pinned
    linears keep all options; so do all linears if `plan` does not reach the target.

    Args:
        problem: a problem with options per GEMM.
        plan: the current plan.
        config: settings; `heal_order` (forward or backward), pins and formats are used.
    """
    if plan.efficiency < problem.target - float(TOLERANCE):
        return problem
    lowest = get_format(config.lowest_format).bits
    fprop_comes_first = config.heal_order == "forward"
    comes_first = [(gemm == Gemm.FPROP) == fprop_comes_first for gemm in Gemm]
    current = {name: bits_of(option) for name, option in plan.linears.items()}
    # What the plan saves with the GEMMs that come second. Below that target the GEMMs that come
    # first are all raised, and the others begin.
    second_share = 0.0
    for row in problem.linears:
        pairs = zip(current[row.name], comes_first, strict=True)
        num_low_second = sum(bits == lowest and not first for bits, first in pairs)
        second_share += row.flops * num_low_second / 3
    total = sum(row.flops for row in problem.linears)
    first_are_raised = problem.target * total < second_share

    def may_become(old: int, new: int, first: bool) -> bool:
        """Whether a GEMM may go from `old` to `new` bits; `first`: it is raised first."""
        if new < old:
            return False
        if first:
            return new > lowest or not first_are_raised
        return new == old or first_are_raised

    def allowed(row: LinearChoices) -> dict[str, OptionCost]:
        if config.pin_of(row.name) is not None:
            return row.options
        raised = {
            text: cost
            for text, cost in row.options.items()
            if all(map(may_become, current[row.name], bits_of(parse_option(text)), comes_first))
        }
        return raised or row.options

    return problem.with_options(allowed)


def describe(replaced: Sequence[Replacement], num_linears: int) -> list[str]:
    """Return one text for each kind of replacement, with the number of linears."""
    texts = []
    settings = Counter((each.new, each.reason) for each in replaced if each.is_setting)
    for (new, flag), count in settings.items():
        verb = "set" if flag == "--snip-pins" else "raised"
        texts.append(f"{count} of {num_linears} linears {verb} to {new}: {flag}")
    refused: dict[tuple[Option, Option], dict[str, str]] = {}
    for each in replaced:
        if not each.is_setting:
            refused.setdefault((each.old, each.new), {})[each.linear] = each.reason
    for (old, new), why in refused.items():
        texts.append(
            f"{len(why)} of {num_linears} linears run {new} instead of {old}: {reasons(why)}"
        )
    return texts


def recipe_changes(plan_file: Path, model: PlannedModel) -> list[str]:
    """Return a line for each option that the run of a plan file ran by another recipe.

    That run wrote what its linears ran under the plan into a folder beside the plan's:
    precision/<iteration>.json. Without such a file nothing is known, and nothing is returned.
    """
    before = _recorded_recipes(plan_file)
    now = {str(linear.option): linear.recipe for linear in model.linears}
    return [
        f"{option} was {before[option]} in the run of '{plan_file}', and is {recipe} here"
        for option, recipe in now.items()
        if before.get(option, recipe) != recipe
    ]


def _recorded_recipes(plan_file: Path) -> dict[str, str]:
    digest = read_plan(plan_file).digest
    for path in sorted((plan_file.parent.parent / "precision").glob("*.json")):
        try:
            table = read_json(path, "precision file", plain=True)
            if table["plan_digest"] == digest:
                return {str(row["option"]): str(row["recipe"]) for row in table["linears"]}
        except (UsageError, KeyError, TypeError):
            continue  # it only serves a message
    return {}
