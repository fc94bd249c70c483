"""Plans and problems as this run can use them: its linears, stages, options and targets.

A plan or problem may come from a checkpoint, a file or a former run with another parallel layout or
GPU. Here it gets the stages and options of this run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import unmeasured_problem
from megatron_snip.formats import get_format
from megatron_snip.guard import GuardState
from megatron_snip.linears.availability import AvailableOptions, available_options, option_refusals
from megatron_snip.linears.calibrate import timed_options
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import BF16, Option
from megatron_snip.pending_solve import plan_from_rank_0
from megatron_snip.planning.plan import PrecisionPlan, assigned_plan, format_shares
from megatron_snip.planning.planner import adapt_plan, healing_problem, initial_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.state import ControllerState
from megatron_snip.types import glob_matches


class RunPlans:
    """What plans of this run choose from and must reach; every method is the same on all ranks.

    Attributes:
        available: what the linears can run.
        targets: the efficiency target of every iteration.
        work: stage and FLOPs for each token, by linear.
    """

    def __init__(
        self,
        config: SnipConfig,
        model: PlannedModel,
        train_iters: int | None,
        calibration_cache: Path | None,
    ) -> None:
        """All ranks; see `SnipController` for the arguments and errors."""
        self.targets = config.targets(train_iters)
        self.work = {i.name: (i.stage, i.flops_per_token) for i in model.all_linears}
        self.available: AvailableOptions = available_options(model, config)
        if config.cost == "time" and not config.collect_only:
            self.available = timed_options(self.available, model, config, calibration_cache)
        self._config = config
        self._model = model
        self._control = model.runtime.topology.control

    def first_plan(
        self, state: ControllerState | None, seed: int, warn: Callable[[str], None]
    ) -> PrecisionPlan:
        """All ranks: rank 0 makes the plan that the run starts with, or resumes with."""
        resumed, num_done = (None, 0) if state is None else (state.plan, state.iteration)
        largest = max(point.target for point in self.targets.points)

        def make() -> PrecisionPlan:
            problem, target = self.unmeasured(largest), self.targets.at(num_done + 1)
            return initial_plan(problem, self._config, seed, resumed, target)

        return self.runnable(plan_from_rank_0(make, self._control), warn)

    def runnable(self, plan: PrecisionPlan, warn: Callable[[str], None]) -> PrecisionPlan:
        """All ranks: return a plan as it can run here; `warn` gets a line for each change."""
        plan.check_against(self.work)
        options = (*plan.linears.values(), *self.available.options)
        refusals = option_refusals(self._model, options)
        lowest = self._config.lowest_format
        found, changes = adapt_plan(plan, self.available.options, refusals, self.work, lowest)
        for text in changes:
            warn(f"{plan.label}: {text}")
        return found

    def guard_state(
        self, state: GuardState | None, warn: Callable[[str], None]
    ) -> GuardState | None:
        """All ranks: return a former run's guard, with its good plan as it can run here."""
        if state is None or state.good is None:
            return state
        return state.model_copy(update={"good": self.runnable(state.good, warn)})

    def lowest_share(self, plan: PrecisionPlan) -> float:
        """Return the share of the linears' FLOPs in the lowest precision under a plan."""
        bits = get_format(self._config.lowest_format).bits
        shares = format_shares(plan.linears, self.work).items()
        return sum(share for name, share in shares if get_format(name).bits == bits)

    def fallback(self, plan: PrecisionPlan, iteration: int) -> PrecisionPlan:
        """Return the guard's last resort: BF16 but for pinned linears, which stay as in `plan`."""
        c, names = self._config, plan.linears
        pinned = {name for glob, _ in c.pin_pairs for name in names if glob_matches(name, glob)}
        linears = {name: o if name in pinned else BF16 for name, o in plan.linears.items()}
        return assigned_plan(linears, self.work, c.lowest_format, "guard", iteration)

    def unmeasured(self, target: float) -> PlanningProblem:
        """Return the problem without quality losses, for policies that need none."""
        linears, lowest = self._model.all_linears, self._config.lowest_format
        problem = unmeasured_problem(linears, self.available.options, lowest, target)
        return self.available.restrict(problem)

    def for_this_run(self, problem: PlanningProblem) -> PlanningProblem:
        """All ranks: return a former run's problem with the stages and options of this run."""
        rows = tuple(
            row.model_copy(update={"stage": self.work[row.name][0]}) for row in problem.linears
        )
        options = dict.fromkeys(Option.parse(name) for row in rows for name in row.options)
        refusals = option_refusals(self._model, options)
        problem = problem.model_copy(update={"linears": rows})
        return replace(self.available, refusals=refusals).restrict(problem)

    def healed(
        self, problem: PlanningProblem, plan: PrecisionPlan, apply_at: int
    ) -> PlanningProblem:
        """Return the problem of a plan for `apply_at`; healing only raises, in --snip-heal-order.

        Args:
            problem: with all options.
            plan: the current one.
            apply_at: the iteration that the new plan is for.
        """
        heal_from = self.targets.heal_from
        if heal_from is None or apply_at < heal_from or self._config.heal_order == "plan":
            return problem
        return healing_problem(problem, plan, self._config)

    def saving_s(self, plan: PrecisionPlan, num_microbatches: int) -> float | None:
        """Return the seconds that a plan saves of a step against BF16.

        It is the difference of the slowest stage's linears, without pipeline bubbles. None if time
        is not the objective, or if the tokens of a microbatch vary.
        """
        table, tokens = self.available.calibration, self._model.runtime.microbatch_tokens
        if table is None or tokens is None:
            return None
        bf16 = dict.fromkeys(plan.linears, BF16)
        before, after = (table.slowest_stage(o, self.work) for o in (bf16, plan.linears))
        c = self._model.config
        ranks = int(c.context_parallel_size * c.tensor_model_parallel_size)
        return (before - after) * tokens * num_microbatches / ranks
