"""The controller: measure -> plan -> broadcast -> apply, every `--snip-interval` iterations.

    iteration i          a refresh is due: this iteration is observed. At its end all ranks sum
                         the statistics, and rank 0 gives the problem to the solver's process
    iteration i + lag    rank 0 broadcasts the plan (or why there is none); every rank applies the
                         same plan before the iteration and checks its digest

Every rank makes the same calls in the same order. If measuring, planning or applying fails on one
rank, all ranks keep the current plan, warn once and continue. A plan that breaks the loss is
reverted (guard.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from megatron_snip.collectives import RemoteFailure, attempt
from megatron_snip.config import SnipConfig
from megatron_snip.errors import PlanningError, SnipError
from megatron_snip.guard import Guard
from megatron_snip.linears.availability import resolve_formats
from megatron_snip.linears.discovery import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.training_step import (
    ForwardBackward,
    PairedEvaluation,
    Results,
    TrainingStep,
)
from megatron_snip.options import BF16
from megatron_snip.planning.plan import PrecisionPlan, changed_linears, format_shares
from megatron_snip.planning.planner import without_objective
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.refresh import Refresher
from megatron_snip.reporting.events import Event, Metrics, PlanApplied, Reporter, Writer
from megatron_snip.run_plans import FirstPlan, PendingSolve, RunPlans
from megatron_snip.state import ControllerState, Pending, reported_settings
from megatron_snip.statistics.health_table import HealthTable
from megatron_snip.topology import Topology


class SnipController:
    """Drives SNIP in one training process; construct it on all ranks together.

    A training loop calls on every rank, for each iteration (1-based, as Megatron counts):
    `forward_backward` in place of its forward-backward function, and `end_iteration`; around
    evaluations `evaluation`; `state` where it saves; and `close` at the end.

    Attributes:
        config: the settings.
        model: the planned linears.
        plan: the current plan.
        history: (iteration, digest) of every plan applied, in order.
    """

    def __init__(
        self,
        config: SnipConfig,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        *,
        seed: int = 0,
        writers: Sequence[Writer] = (),
        state: ControllerState | None = None,
        topology: Topology | None = None,
        solver: SolverProcess | None = None,
        microbatch_tokens: int | None = None,
        calibration_cache: Path | None = None,
        train_iters: int | None = None,
    ) -> None:
        """All ranks: attach to a built model.

        Args:
            config: the settings.
            model: Megatron's model chunks.
            optimizer: Megatron's optimizer.
            seed: of stochastic rounding, sampled tokens and the solver; the same on all ranks.
            writers: record events; on the ranks that report.
            state: continue from here (`state()` of the stopped run); None starts a new run.
            topology: this rank's place in the parallel layout; by default Megatron's.
            solver: solves on rank 0; by default a process of its own.
            microbatch_tokens: samples of a microbatch times their length; None if they vary.
            calibration_cache: file of rank 0 that stores measured seconds for a resumed run.
            train_iters: the last iteration of the run; healing needs it.

        Raises:
            UsageError: on every rank, if the policy is unknown, a pin or the plan file does not
                fit the model, healing does not fit the run, or no plan reaches the target.
            UnsupportedError: on every rank, if the backend cannot run the model's linears or the
                lowest precision among the formats, or the target cannot count seconds.
        """
        topology = current_topology() if topology is None else topology
        config = resolve_formats(config, model, topology.control)
        self.config = config
        self.model = PlannedModel(model, topology, seed, config.backend, microbatch_tokens)
        self.history: list[tuple[int, str]] = [] if state is None else list(state.history)
        self._optimizer = optimizer
        self._control = topology.control
        self._reporter = Reporter(writers, logs=topology.rank == 0)
        self._plans = RunPlans(config, self.model, train_iters, calibration_cache)
        self._is_timed = False  # whether the iteration is ordinary, so that `step_s` is reported
        self._step_s: list[float] = []  # of ordinary iterations under the current plan
        available = self._plans.available
        for text in available.warnings:
            self._reporter.warn(text)
        self._refresher = Refresher(config, self.model, available, optimizer, state)
        self._schedule = self._refresher.schedule
        measures = config.plan_file is None and (config.collect_only or not self._schedule.static)
        if measures and train_iters is not None and train_iters < config.start_step:
            self._reporter.warn(
                f"nothing will be measured: --snip-start-step is {config.start_step}, and the run "
                f"has {train_iters} iterations"
            )
        first = self._plans.first_plan(state, seed)
        self.plan = first.plan
        target = self.plan.target if state is None or state.target is None else state.target
        can_replan = self._schedule.static or self._refresher.mean is not None
        self._planned_target = target if can_replan else None
        solves = topology.rank == 0 and self._schedule.replans
        solver = (solver or SolverProcess()) if solves else None
        self._evaluated: dict[str, Any] = {}  # by the evaluation after the current iteration
        self._alerted: set[tuple[str, str]] = set(() if state is None else state.alerted)
        self._solve = PendingSolve(PlanSettings.from_config(config, seed), self._control, solver)
        self._guarded = config.guard and self._schedule.replans
        former = state.guard if state is not None and self._guarded else None
        if former is not None and former.good is not None:
            good, _ = self._plans.fitted(former.good)
            former = former.model_copy(update={"good": good})
        self._guard = Guard(config.guard_sigmas, topology, former)
        self._start(state, first)

    @property
    def format_shares(self) -> dict[str, float]:
        """Share of the linears' FLOPs in each format under the current plan."""
        return format_shares(self.plan.linears, self._plans.work)

    def forward_backward(self, iteration: int, function: ForwardBackward, **kwargs: Any) -> Results:
        """All ranks: run an iteration's forward-backward under the plan, observed if it is due.

        A plan that is due is applied first. Megatron may call this several times for one
        iteration. Returns what `function` returns.

        Args:
            iteration: Megatron's (1-based).
            function: Megatron's forward-backward function.
            kwargs: its keyword arguments.
        """
        self._guard.finish_loss()
        if self._solve.is_due(iteration):
            with self._keeping_plan(iteration):
                self._apply_solved(iteration, kwargs.get("num_microbatches", 1))
        training = TrainingStep(function, kwargs)
        # A plan that is being solved (the guard's refresh, a new target) is applied first.
        may_begin, wanted_at = self._solve.pending is None, self._guard.state.refresh_at
        part = self._schedule.part(iteration, wanted_at, may_begin)
        if part is None:
            with self._keeping_plan(iteration):
                self._replan_for_new_target(iteration)
            return self._train(iteration, training)[0]
        self._is_timed = False
        results = self._refresher.measure(
            iteration, part, training, lambda: self._train(iteration, training)
        )
        if part == self._schedule.num_parts - 1:
            with self._keeping_plan(iteration):
                self._finish_refresh(iteration)
        return results

    def end_iteration(self, iteration: int, metrics: dict[str, Any]) -> None:
        """All ranks, after an iteration and its evaluation: report its metrics.

        Args:
            iteration: Megatron's (1-based).
            metrics: by name, such as `loss`, `grad_norm` and `lr`; `step_s` is in seconds. It is
                dropped if the iteration measured, was watched by the guard, or was the first under
                its plan or in this process.
        """
        self._guard.finish_loss()
        if not self._is_timed:
            metrics = {name: value for name, value in metrics.items() if name != "step_s"}
        elif "step_s" in metrics:
            self._step_s.append(metrics["step_s"])
        self._is_timed = True
        fraction = {"lowest_precision_fraction": self._plans.lowest_precision_share(self.plan)}
        self._reporter.write(Event(iteration, Metrics(metrics | fraction | self._evaluated)))
        self._evaluated = {}

    @contextmanager
    def evaluation(self) -> Iterator[Callable[..., Results] | None]:
        """All ranks: the context in which an evaluation runs, in the plan's precision or BF16.

        With `--snip-eval-precision both` it yields a function to call in place of Megatron's
        forward-backward function, which is its first argument; else None.
        """
        runtime = self.model.runtime
        if self.config.eval_precision == "both":
            paired = PairedEvaluation(runtime)
            yield paired.run
            if (found := paired.increase()) is not None:
                self._report_increase(runtime.iteration, *found)
        else:
            is_bf16 = self.config.eval_precision == "bf16"
            with runtime.running_in_bf16() if is_bf16 else nullcontext():
                yield None

    def state(self, iteration: int) -> ControllerState:
        """Return what a checkpoint after `iteration` keeps; the same on all ranks."""
        return ControllerState(
            iteration=iteration,
            plan=self.plan,
            history=tuple(self.history),
            refreshed=self._schedule.refreshed,
            pending=self._solve.pending,
            guard=self._guard.state if self._guarded else None,
            statistics=self._refresher.mean,
            settings=reported_settings(self.config, str(self.model.backend)),
            target=self._planned_target,
            alerted=tuple(sorted(self._alerted)),
        )

    def close(self) -> None:
        """All ranks: restore Megatron's methods, end the solver's process, close the writers."""
        self.model.uninstall()
        self._solve.close()
        self._reporter.close()

    def _train(self, iteration: int, training: TrainingStep) -> tuple[Results, bool]:
        """All ranks: run the forward-backward; return its results, and False if it ran twice."""
        if self._guard.is_watching:
            return self._train_watched(iteration, training)
        with self.model.runtime.training_pass(iteration):
            results = training.run()
        if self._guarded:
            self._guard.start_loss(results)
        return results, True

    def _finish_refresh(self, iteration: int) -> None:
        """All ranks: every linear was measured; give the problem to the solver."""
        if self._refresher.failure is not None:
            raise PlanningError(self._refresher.failure)
        target = self._plans.targets.at(iteration + self.config.lag)
        make = partial(self._refresher.measurement, target)
        measured = attempt("making a planning problem", make, self._control)
        self._reporter.log(
            f"iteration {iteration}: measured {len(self.model.all_linears)} linears in "
            f"{measured.seconds:.2f} s"
        )
        self._reporter.write(Event(iteration, measured))
        self._alert(iteration, measured.health)
        if self._schedule.replans:
            self._submit(iteration, measured.problem)

    def _replan_for_new_target(self, iteration: int) -> None:
        """All ranks: if the target is about to change, plan anew from the last measurement."""
        target = self._plans.targets.at(iteration + self.config.lag)
        is_new = self._planned_target not in (None, target) and self._solve.pending is None
        if not (is_new and self._schedule.may_replan(iteration)):
            return
        self._planned_target = target

        def make() -> PlanningProblem:
            if self._schedule.static:
                return self._plans.unmeasured(target)
            return self._refresher.measurement(target).problem

        problem = attempt("planning anew", make, self._control)
        self._submit(iteration, self._plans.adapted_problem(problem))

    def _submit(
        self, iteration: int, problem: PlanningProblem, apply_at: int | None = None
    ) -> None:
        """All ranks: give a problem to the solver; its plan is due `lag` iterations later."""
        if apply_at is None:
            apply_at = iteration + self.config.lag
        self._planned_target = problem.target
        problem = self._plans.restrict_for_healing(problem, self.plan, apply_at)
        self._solve.submit(Pending(iteration, apply_at, problem), self.plan)

    def _apply_solved(self, iteration: int, num_microbatches: int) -> None:
        """All ranks: get the plan from rank 0 and apply it."""
        plan, waited_s = self._solve.result()
        plan = without_objective(plan) if self._schedule.static else plan
        plan.check_against(self._plans.work)
        saving_s = self._plans.saving_s(plan, num_microbatches)
        if plan.digest in self._guard.state.refused:
            raise PlanningError(f"the guard reverted {plan.label} before")
        try:
            attempt("applying the plan", lambda: self.model.apply(plan.linears), self._control)
        except RemoteFailure:
            self.model.apply(self.plan.linears)
            raise
        if self._guarded and changed_linears(self.plan, plan):
            self._guard.plan_changed(self.plan)
        before = ""
        if saving_s is not None and self._step_s:
            before = f", mean step before {1e3 * fmean(self._step_s):.4g} ms"
        applied = self._set_plan(iteration, plan, waited_s=waited_s, saving_s=saving_s)
        self._reporter.log(f"iteration {iteration}: {applied.summary}{before}")

    @contextmanager
    def _keeping_plan(self, iteration: int) -> Iterator[None]:
        """All ranks: on a SnipError, the same on all ranks, keep the current plan and report it."""
        try:
            yield
        except SnipError as failure:
            text = f"keeping {self.plan.label}: {failure}"
            self._reporter.notify(iteration, "refresh_failed", text)

    def _train_watched(self, iteration: int, training: TrainingStep) -> tuple[Results, bool]:
        """All ranks: run an iteration whose loss decides whether the current plan stays."""
        self._is_timed = False

        def run(plan: PrecisionPlan) -> Results:
            self.model.apply(plan.linears)
            with self.model.runtime.training_pass(iteration):
                return training.run()

        safe = self._plans.fallback(self.plan, iteration)
        judged = self._guard.run_watched(training, self.plan, safe, run, self._optimizer)
        if judged.message is not None:
            self._reporter.notify(iteration, "guard", judged.message)
        if judged.fallback is None:
            self.model.apply(self.plan.linears)
        else:
            self._revert(iteration, judged.fallback)
        return judged.results, judged.message is None

    def _revert(self, iteration: int, fallback: PrecisionPlan) -> None:
        """All ranks: the iteration ran under `fallback`, which is the plan from now on."""
        self._solve.pending = None  # it was measured under the reverted plan
        # A new iteration gives it a file of its own beside the fallback's.
        plan = fallback.model_copy(update={"iteration": iteration})
        self._guard.reverted(self.plan, plan, iteration)
        num_changed = len(changed_linears(self.plan, plan))
        text = (
            f"reverted {self.plan.label}: {num_changed} of {len(plan.linears)} linears are as in "
            f"{fallback.label}"
        )
        self._reporter.notify(iteration, "reverted", text)
        self._set_plan(iteration, plan)

    def _start(self, state: ControllerState | None, first: FirstPlan) -> None:
        """All ranks: apply the first plan; solve again what was being solved."""
        self.model.install()
        self.model.apply(self.plan.linears)
        before = {} if state is None else state.plan.linears
        num_changed = sum(o != before.get(name, BF16) for name, o in self.plan.linears.items())
        continues = state is not None and state.plan.digest == self.plan.digest
        num_done = 0 if state is None else state.iteration
        if state is not None and not continues:
            self.history.append((num_done + 1, self.plan.digest))
        if num_changed or self.history or not self._schedule.replans:
            self._report_plan(num_done + 1, num_changed, resumed=continues)
        for text in self._differences(state, first):
            self._reporter.warn(text)
        if state is None or not self._schedule.replans:
            return
        with self._keeping_plan(num_done):
            if first.replans and self._refresher.is_measured:
                self._replan_at_once(num_done)
            elif first.continues and state.pending is not None:
                pending = state.pending
                problem = self._plans.adapted_problem(pending.problem)
                apply_at = min(pending.apply_at, pending.iteration + self.config.lag)
                apply_at = max(apply_at, num_done + 1)
                self._solve.submit(Pending(pending.iteration, apply_at, problem), self.plan)

    def _differences(self, state: ControllerState | None, first: FirstPlan) -> list[str]:
        """Return lines that say what is not as in the stopped run or in the plan file."""
        settings = []
        if state is not None:
            settings = state.changes(reported_settings(self.config, str(self.model.backend)))
        if not settings:
            return [f"{self.plan.label}: {text}" for text in first.changes]
        texts = [*settings, *first.changes]
        if first.replans and not self._refresher.is_measured:
            texts.append("the next refresh plans with them")
        return [f"this run resumes with other settings: {'; '.join(texts)}"]

    def _replan_at_once(self, num_done: int) -> None:
        """All ranks: plan from the checkpoint's measurements, before the first iteration."""
        target = self._plans.targets.at(num_done + 1)
        make = partial(self._refresher.measurement, target)
        problem = attempt("planning for the new settings", make, self._control).problem
        problem = self._plans.adapted_problem(problem)
        self._submit(num_done, problem, apply_at=num_done + 1)

    def _set_plan(self, iteration: int, plan: PrecisionPlan, **more: Any) -> PlanApplied:
        """All ranks: `plan`, which was applied, is the current one from `iteration` on."""
        num_changed = len(changed_linears(self.plan, plan))
        self.plan = plan
        self.history.append((iteration, plan.digest))
        return self._report_plan(iteration, num_changed, **more)

    def _report_plan(self, iteration: int, num_changed: int, **more: Any) -> PlanApplied:
        """All ranks: report the current plan and what every linear runs under it."""
        table = self.model.resolved(self.plan, iteration)
        applied = PlanApplied(self.plan, self.format_shares, num_changed, resolved=table, **more)
        self._reporter.write(Event(iteration, applied))
        self._is_timed, self._step_s = False, []
        return applied

    def _report_increase(self, iteration: int, increase: float, error: float) -> None:
        """All ranks: log what the plan costs an evaluation; `end_iteration` reports it."""
        predicted = self._refresher.loss_divergence(self.plan)
        names = ("eval/loss_increase", "eval/loss_increase_error", "eval/loss_divergence")
        self._evaluated = dict(zip(names, (increase, error, predicted), strict=True))
        text = f"{increase:+.4g} +- {error:.2g} nat a token against bf16"
        score = "" if predicted is None else f", loss divergence of the plan {predicted:.4g}"
        label = f"evaluation under {self.plan.label}"
        self._reporter.log(f"iteration {iteration}: {label}: {text}{score}")

    def _alert(self, iteration: int, health: HealthTable) -> None:
        """All ranks: notify of linears beyond the thresholds of --snip-alert, each once."""
        found = []
        for text, measure, sign, limit in self.config.alerts:
            beyond = health.beyond(measure, sign, limit)
            new = [each for each in beyond if (text, each.linear) not in self._alerted]
            self._alerted |= {(text, each.linear) for each in new}
            if new:
                found.append(f"alert {text}: {', '.join(map(str, new))}")
        if found:  # one notice: W&B drops a second alert with the same title within a minute
            self._reporter.notify(iteration, "health", "; ".join(found))
