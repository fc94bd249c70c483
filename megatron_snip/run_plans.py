"""Plans inside of a running job: what it can run, what it must reach, and the pending solve.

A plan or problem may come from a checkpoint, a file or a former run with another parallel layout or
GPU. `RunPlans` gives it the stages and options of this run.

With `PendingSolve` training waits for the solver only at the iteration where its plan is due. If
rank 0 has no valid plan then (a crash, a timeout), all ranks get the same error.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from megatron_snip.collectives import attempt, on_rank_0
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import unmeasured_problem
from megatron_snip.errors import InfeasiblePlanError, PlanningError, SnipError, UsageError
from megatron_snip.formats import get_format
from megatron_snip.linears.availability import AvailableOptions, available_options, option_refusals
from megatron_snip.linears.calibrate import timed_options
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import BF16, Option
from megatron_snip.planning.plan import PrecisionPlan, assigned_plan, format_shares
from megatron_snip.planning.planner import adapt_plan, healing_problem, initial_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.state import ControllerState, Pending

SOLVER_GRACE_S = 10.0
"""Training waits for a plan at most this long beyond the solver's time limit."""


class RunPlans:
    """The options and targets of this run's plans; every method returns the same on all ranks.

    Attributes:
        available: what the linears can run.
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

        return self.adapted_plan(plan_from_rank_0(make, self._control), warn)

    def adapted_plan(self, plan: PrecisionPlan, warn: Callable[[str], None]) -> PrecisionPlan:
        """All ranks: return a plan as it can run here; `warn` gets a line for each change."""
        plan.check_against(self.work)
        options = (*plan.linears.values(), *self.available.options)
        refusals = option_refusals(self._model, options)
        lowest = self._config.lowest_format
        found, changes = adapt_plan(plan, self.available.options, refusals, self.work, lowest)
        for text in changes:
            warn(f"{plan.label}: {text}")
        return found

    def lowest_precision_share(self, plan: PrecisionPlan) -> float:
        """Return the share of the linears' FLOPs in the lowest precision under a plan."""
        bits = get_format(self._config.lowest_format).bits
        shares = format_shares(plan.linears, self.work).items()
        return sum(share for name, share in shares if get_format(name).bits == bits)

    def fallback(self, plan: PrecisionPlan, iteration: int) -> PrecisionPlan:
        """Return the guard's last fallback: BF16; pinned linears stay as in `plan`."""
        c = self._config
        linears = {name: o if c.is_pinned(name) else BF16 for name, o in plan.linears.items()}
        return assigned_plan(linears, self.work, c.lowest_format, "guard", iteration)

    def unmeasured(self, target: float) -> PlanningProblem:
        """Return the problem before any measurement: all quality losses are 0."""
        linears, lowest = self._model.all_linears, self._config.lowest_format
        problem = unmeasured_problem(linears, self.available.options, lowest, target)
        return self.available.restrict(problem)

    def adapted_problem(self, problem: PlanningProblem) -> PlanningProblem:
        """All ranks: return a former run's problem with the stages and options of this run."""
        rows = tuple(
            row.model_copy(update={"stage": self.work[row.name][0]}) for row in problem.linears
        )
        options = dict.fromkeys(Option.parse(name) for row in rows for name in row.options)
        refusals = option_refusals(self._model, options)
        problem = problem.model_copy(update={"linears": rows})
        return replace(self.available, refusals=refusals).restrict(problem)

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
        table, tokens = self.available.calibration, self._model.runtime.microbatch_tokens
        if table is None or tokens is None:
            return None
        bf16 = dict.fromkeys(plan.linears, BF16)
        before, after = (table.slowest_stage(o, self.work) for o in (bf16, plan.linears))
        megatron = self._model.config
        ranks = int(megatron.context_parallel_size * megatron.tensor_model_parallel_size)
        return (before - after) * tokens * num_microbatches / ranks


class PendingSolve:
    """The problem that rank 0's solver works on; all ranks call every method together.

    Attributes:
        pending: what is being solved, the same on all ranks; None if nothing is. Setting it to None
            drops the plan.
    """

    def __init__(
        self, settings: PlanSettings, control: ProcessGroup | None, solver: SolverProcess | None
    ) -> None:
        """Start with nothing to solve; `solver` is None on ranks other than 0."""
        self.pending: Pending | None = None
        self._settings = settings
        self._control = control
        self._solver = solver
        self._submit_error: Exception | None = None

    def submit(self, pending: Pending, plan: PrecisionPlan) -> None:
        """Rank 0 starts to solve; `plan` is the current one."""
        self.pending, self._submit_error = pending, None
        if self._solver is None:
            return
        try:
            self._solver.submit(pending.problem, self._settings, plan, pending.iteration)
        except Exception as error:  # all ranks get it when the plan is due
            self._submit_error = error

    def is_due(self, iteration: int) -> bool:
        """Whether the plan must be applied before `iteration`."""
        return self.pending is not None and iteration >= self.pending.apply_at

    def result(self) -> tuple[PrecisionPlan, float]:
        """Return rank 0's plan and the seconds that training waited for it.

        Raises:
            PlanningError: the same on every rank, if there is no plan.
        """
        assert self.pending is not None
        pending, self.pending = self.pending, None
        begin = time.perf_counter()
        try:
            plan = plan_from_rank_0(self._solved, self._control)
        except SnipError as error:
            why = f"no plan from the statistics of iteration {pending.iteration}: {error}"
            raise PlanningError(why) from None
        return plan, time.perf_counter() - begin

    def close(self) -> None:
        """End the solver's process."""
        if self._solver is not None:
            self._solver.close()

    def _solved(self) -> PrecisionPlan:
        if self._submit_error is not None:
            raise self._submit_error
        assert self._solver is not None, "rank 0 has the solver"
        return self._solver.result(self._settings.time_limit_s + SOLVER_GRACE_S)


def plan_from_rank_0(
    make: Callable[[], PrecisionPlan], control: ProcessGroup | None
) -> PrecisionPlan:
    """All ranks: return the plan that rank 0 makes.

    Args:
        make: called on rank 0 only.
        control: a group of all ranks.

    Raises:
        UsageError: on every rank, if `make` raised one or an InfeasiblePlanError.
        RemoteFailure: on every rank, if it raised anything else, or a rank cannot read the plan.
    """

    def plan_dict() -> dict[str, Any]:
        try:
            return make().to_dict()
        except InfeasiblePlanError as error:
            raise UsageError(str(error), "efficiency_target") from None

    found = on_rank_0("planning", plan_dict, control)
    return attempt("reading the plan", lambda: PrecisionPlan.from_dict(found), control)
