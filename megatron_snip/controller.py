"""The loop that closes: due -> measure -> plan -> broadcast -> apply -> report.

    step s            a refresh is due: this training iteration is observed; at its end one
                      reduction, and rank 0 hands the problem to the solver's process
    step s + lag      rank 0 broadcasts the outcome (a plan, or why there is none); every rank
                      applies the same plan between two steps and checks its digest

Every rank makes the same calls in the same order. A failure anywhere becomes the same decision on
every rank: keep the old plan, warn once, go on. A plan that breaks the loss
goes (plan_guard.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from megatron_snip.collectives import RemoteFailure, attempt
from megatron_snip.config import SnipConfig
from megatron_snip.controller_state import ControllerState, Pending
from megatron_snip.cycle.announcer import Announcer
from megatron_snip.cycle.offer import Offer
from megatron_snip.cycle.refresher import Refresher
from megatron_snip.cycle.schedule import Schedule
from megatron_snip.cycle.solving import Solving, from_leader
from megatron_snip.errors import PlanningError
from megatron_snip.linears.discovery import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.precision_log import precision_table
from megatron_snip.linears.runtime import Mode
from megatron_snip.linears.training_step import ForwardBackward, TrainingStep
from megatron_snip.options import BF16
from megatron_snip.plan_guard import PlanGuard
from megatron_snip.planning.plan import PrecisionPlan, changed_linears
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.reporting.reporter import Applied, Reporter
from megatron_snip.topology import Topology


class SnipController:
    """Drives SNIP for one training process; construct it on all ranks together.

    A training loop calls, on every rank and in this order for each step: `begin_step`,
    `forward_backward` in place of its forward-backward function, `end_step`; and `close` at the
    end.

    Attributes:
        config: the settings.
        model: the planned linears.
        plan: the plan in force.
        history: (step, digest) of every plan applied, in order.
    """

    def __init__(
        self,
        config: SnipConfig,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        reporter: Reporter | None = None,
        solver: SolverProcess | None = None,
        state: ControllerState | None = None,
        topology: Topology | None = None,
    ) -> None:
        """All ranks: attach to a built model.

        Args:
            config: the settings.
            model: Megatron's model chunks.
            optimizer: Megatron's optimizer.
            reporter: told of everything; pass one on the ranks that report and None elsewhere.
            solver: solves on rank 0; by default a process of its own.
            state: go on from here (`state()` of the run that was stopped).
            topology: this rank's place, where the caller has made it; by default Megatron's.

        Raises:
            UsageError: on every rank, if the policy is unknown, a pin or the plan file does not
                fit the model, or no plan reaches the target.
            UnsupportedError: on every rank, if the backend cannot run the model's linears or the
                lowest precision on offer.
        """
        topology = current_topology() if topology is None else topology
        leader = topology.rank == 0
        self.config = config
        self.model = PlannedModel(model, topology, config.seed, config.backend)
        self._optimizer = optimizer
        self._control = topology.control
        self._announcer = Announcer(reporter, leader)
        self._schedule = Schedule(config, None if state is None else state.refreshed)
        self._offer = Offer(config, self.model, self._announcer)
        self.history: list[tuple[int, str]] = [] if state is None else list(state.history)
        self.plan = self._first_plan(leader, None if state is None else state.plan)
        if leader and self._schedule.replans:
            solver = SolverProcess() if solver is None else solver
        else:
            solver = None
        self._solving = Solving(config, self._offer, self._control, solver)
        self._guard = self._made_guard(topology, state)
        self._refresher = Refresher(
            config,
            self.model,
            optimizer,
            topology,
            self._offer,
            self._schedule.num_parts,
            None if state is None else state.statistics,
        )
        self._measuring_failed: str | None = None
        self._start(state)

    # What a training loop calls.

    def begin_step(self, step: int) -> None:
        """All ranks, before step `step` (0-based): apply the pending plan if it is time."""
        if self._guard is not None:
            self._guard.hear()
        if self._solving.due(step):
            self._conclude(step)

    def forward_backward(
        self, step: int, function: ForwardBackward, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """All ranks: run the step's forward-backward, observed where a refresh is due.

        Args:
            step: training step (0-based).
            function: Megatron's forward-backward function.
            kwargs: its keyword arguments.

        Returns:
            What `function` returns.
        """
        training = TrainingStep(function, kwargs)
        wanted_at = None if self._guard is None else self._guard.refresh_at
        # A plan that is being solved, after a refresh out of turn, comes first.
        may_begin = self._solving.pending is None
        part = self._schedule.part(step, wanted_at, may_begin)
        if part is None:
            return self._train(step, training)[0]
        return self._measure(step, part, training)

    def end_step(self, step: int, metrics: dict[str, Any]) -> None:
        """All ranks, after step `step`: report its metrics."""
        if self._guard is not None:
            self._guard.hear()
        values = {**metrics, "lowest_precision_fraction": self.lowest_precision_fraction}
        self._announcer.tell(lambda r: r.metrics(step, values))

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context in which an evaluation runs: the plan's precision, or BF16."""
        if self.config.eval_precision == "bf16":
            return self.model.runtime.running(Mode.BF16)
        return nullcontext()

    def state(self, step: int) -> ControllerState:
        """Return what a checkpoint after `step` training steps keeps; the same on all ranks."""
        guard = None if self._guard is None else self._guard.state()
        refreshed, pending = self._schedule.refreshed, self._solving.pending
        return ControllerState(
            step, self.plan, tuple(self.history), refreshed, pending, guard, self._refresher.mean
        )

    def close(self) -> None:
        """All ranks: put Megatron's methods back, end the solver's process, close reports."""
        self.model.uninstall()
        self._solving.close()
        self._announcer.tell(lambda r: r.close())

    @property
    def lowest_precision_fraction(self) -> float:
        """Share of the linears' FLOPs in the lowest precision on offer under the current plan."""
        lowest = self.config.lowest_format
        total = sum(linear.flops_per_token for linear in self.model.all_linears)
        low = sum(
            linear.flops_per_token * self.plan.linears[linear.name].share_in(lowest)
            for linear in self.model.all_linears
        )
        return low / total if total else 0.0

    # The steps of a cycle.

    def _train(self, step: int, training: TrainingStep) -> tuple[list[dict[str, Any]], bool]:
        """All ranks: run the forward-backward; return its results and whether it ran once only."""
        if self._guard is not None and self._guard.watching:
            return self._watched(step, training, self._guard)
        self.model.runtime.begin_pass(step)
        results = training.run()
        if self._guard is not None:
            self._guard.noted(results)
        return results, True

    def _measure(self, step: int, part: int, training: TrainingStep) -> list[dict[str, Any]]:
        """All ranks: run the forward-backward observed; rank 0 starts the solver at the end."""
        results, failure = self._refresher.measure(
            step, part, training, lambda: self._train(step, training)
        )
        if part == 0:
            self._measuring_failed = None
        self._measuring_failed = self._measuring_failed or failure
        if part == self._schedule.num_parts - 1:
            self._finish_refresh(step)
        return results

    def _finish_refresh(self, step: int) -> None:
        """All ranks: every linear was measured; hand the problem to the solver."""
        if self._measuring_failed is not None:
            why = f"the refresh at step {step} was given up: {self._measuring_failed}"
            self._keep(step, why)
            return
        try:
            refresh = attempt(
                "making a planning problem", lambda: self._refresher.refresh(step), self._control
            )
        except RemoteFailure as failure:
            self._keep(step, f"the refresh at step {step} was given up: {failure}")
            return
        self._announcer.tell(lambda r: r.refreshed(refresh))
        if self._schedule.replans:
            metrics = refresh.divergences.metrics()
            pending = Pending(step, step + self.config.lag, refresh.problem, metrics)
            self._solving.submit(pending, self.plan)

    def _conclude(self, step: int) -> None:
        """All ranks: hear the outcome from rank 0 and apply the same plan, or keep the old one."""
        try:
            plan, waited_s = self._solving.conclude()
        except (PlanningError, RemoteFailure) as failure:
            self._keep(step, str(failure))
            return
        if self._guard is not None and self._guard.refuses(plan):
            why = f"the loss guard took back the very plan of step {plan.step} before"
            self._keep(step, why)
            return
        self._apply(plan, step, waited_s)

    def _apply(self, plan: PrecisionPlan, step: int, waited_s: float) -> None:
        """All ranks: set every linear; the plan's digest was checked when it was read."""
        changed = changed_linears(self.plan, plan)
        try:
            attempt("applying the plan", lambda: self.model.apply(plan.linears), self._control)
        except RemoteFailure as failure:
            self.model.apply(self.plan.linears)
            self._keep(step, str(failure))
            return
        if self._guard is not None and changed:
            self._guard.changed(self.plan)
        self.plan = plan
        self.history.append((step, plan.digest))
        self._announcer.applied(Applied(plan, step, len(changed), waited_s))
        if changed:
            self._log_precision(step)

    def _keep(self, step: int, why: str) -> None:
        message = f"the plan of step {self.plan.step} stays: {why}"
        self._announcer.happened(step, "kept", message)

    # A plan that has yet to prove itself.

    def _watched(
        self, step: int, training: TrainingStep, guard: PlanGuard
    ) -> tuple[list[dict[str, Any]], bool]:
        """All ranks: make a step whose loss decides whether the plan in force stays."""

        def run(plan: PrecisionPlan) -> list[dict[str, Any]]:
            self.model.apply(plan.linears)
            self.model.runtime.begin_pass(step)
            return training.run()

        def clear() -> None:
            for chunk in training.chunks:
                clear_buffers: Any = getattr(chunk, "zero_grad_buffer", None)
                if clear_buffers is not None:
                    clear_buffers()
            self._optimizer.zero_grad()

        safe = self._offer.safe_plan(self.plan, step)
        judged = guard.watch(training, self.plan, safe, run, clear)
        if judged.message is not None:
            self._announcer.happened(step, "guard", f"step {step}: {judged.message}")
        if judged.fallback is None:
            self.model.apply(self.plan.linears)
        else:
            self._fall_back(step, judged.fallback, guard)
        return judged.results, judged.message is None

    def _fall_back(self, step: int, fallback: PrecisionPlan, guard: PlanGuard) -> None:
        """All ranks: `fallback`, which the step was made under, is the plan from now on."""
        self._solving.drop()
        # A plan's step names its file; that of the plan it repeats is taken.
        plan = fallback.model_copy(update={"step": step})
        guard.fell(self.plan, plan, step)
        changed = changed_linears(self.plan, plan)
        was, self.plan = self.plan, plan
        self.history.append((step, plan.digest))
        message = (
            f"the plan of step {was.step} was taken back: {len(changed)} of {len(plan.linears)} "
            f"linears are as in the {fallback.policy} plan of step {fallback.step}"
        )
        self._announcer.happened(step, "fallback", message)
        self._announcer.tell(lambda r: r.planned(Applied(plan, step, len(changed), 0.0)))
        if changed:
            self._log_precision(step)

    # The beginning of a run.

    def _first_plan(self, leader: bool, resumed: PrecisionPlan | None) -> PrecisionPlan:
        """All ranks: rank 0 makes the plan that the run starts with; the others hear of it."""

        def make() -> PrecisionPlan:
            return self._offer.first_plan(self._schedule, resumed)

        plan = PrecisionPlan.from_dict(from_leader(make if leader else None, self._control))
        return self._offer.runnable(self._offer.checked(plan))

    def _made_guard(self, topology: Topology, state: ControllerState | None) -> PlanGuard | None:
        """All ranks: return the guard, if plans change in this run."""
        if not (self.config.guard and self._schedule.replans):
            return None
        guard = None if state is None else state.guard
        if guard is not None and guard.good is not None:
            good = self._offer.runnable(self._offer.checked(guard.good))
            guard = replace(guard, good=good)
        return PlanGuard(self.config, topology, guard)

    def _start(self, state: ControllerState | None) -> None:
        """All ranks: put the plan in force; solve again what was being solved."""
        self.model.install()
        self.model.apply(self.plan.linears)
        self._log_precision(0 if state is None else state.step)
        if state is not None and state.pending is not None and self._schedule.replans:
            self._resubmit(state.pending)
        self._announce_start(state)

    def _announce_start(self, state: ControllerState | None) -> None:
        """Tell of the plan that the run starts with, if it is a policy's, or stays."""
        stays = self._schedule.static or self.config.freeze_plan
        if state is not None and (state.history or stays):
            changed = len(changed_linears(state.plan, self.plan))
            # A plan file may be another one than before the stop.
            resumed = not (self.config.freeze_plan and changed)
            applied = Applied(self.plan, state.step, changed, 0.0, resumed=resumed)
        elif stays:  # the only plan that this run will report
            changed = sum(option != BF16 for option in self.plan.linears.values())
            applied = Applied(self.plan, 0, changed, 0.0)
        else:
            return
        self._announcer.tell(lambda r: r.planned(applied))

    def _resubmit(self, pending: Pending) -> None:
        problem = self._offer.placed(pending.problem)
        if problem is None:
            why = f"the problem of step {pending.step} is of another model"
            self._keep(pending.apply_at, why)
            return
        self._solving.submit(replace(pending, problem=problem), self.plan)

    def _log_precision(self, step: int) -> None:
        """All ranks: say what every linear resolved to from `step` on, where that is wanted."""
        if self.config.precision_log:
            table = precision_table(self.model.linears, self.plan, step, self._control)
            self._announcer.precision(step, table)
