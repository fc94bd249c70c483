"""The loop that closes: due -> measure -> plan -> broadcast -> apply -> report.

    step s            a refresh is due: pass A, pass B, one reduction; rank 0 hands the problem to
                      the solver's process and training goes on with the old plan
    step s + lag      rank 0 broadcasts the outcome (a plan, or why there is none); every rank
                      applies the same plan between two steps and checks its digest

Every rank makes the same calls in the same order. A failure anywhere becomes the same decision on
every rank: keep the old plan, warn once, go on. Two groups of all ranks see to that: measuring
talks over one that waits `timeout` seconds, and whatever became of it is agreed on over the other.
A rank that fails on its own leaves the others waiting on the first; they give up, agree on the
second, and make the first anew.

A plan that breaks the loss goes: plan_guard.py.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_snip.collectives import RemoteFailure, attempt, broadcast_json, confirm, one_line
from megatron_snip.config import SnipConfig
from megatron_snip.controller_state import ControllerState, Pending
from megatron_snip.divergence.quality import (
    QualitySettings,
    divergence_table,
    problem_dict,
    unmeasured_problem_dict,
)
from megatron_snip.errors import InfeasiblePlanError, SnipError, UsageError
from megatron_snip.linears.careful import CarefulPasses, StrandedError, out_of_memory
from megatron_snip.linears.layout import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.passes import ForwardBackward, MeasuringPasses, TrainingPass
from megatron_snip.linears.precision_log import precision_table
from megatron_snip.linears.runnable import nearest, offered, restricted, told_changes
from megatron_snip.linears.runtime import Mode
from megatron_snip.log import warn_once
from megatron_snip.options import BF16, Option
from megatron_snip.plan_guard import PlanGuard
from megatron_snip.planning.assigned import Work, assigned_plan
from megatron_snip.planning.plan import PrecisionPlan, changed_linears, read_plan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import get_policy
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.reporting.reporter import (
    Applied,
    Event,
    EventKind,
    NullReporter,
    Refresh,
    Reporter,
    tell_precision,
)
from megatron_snip.statistics.recorder import MeasureSettings
from megatron_snip.statistics.refresh import RefreshInputs, measure
from megatron_snip.topology import Topology

logger = logging.getLogger(__name__)

SOLVER_GRACE_S = 10.0
"""Seconds past the solver's own time limit after which training gives it up."""

FEWER = 4
"""A refresh that runs out of memory is tried again with this part of microbatches and rows."""

_AGREED = "agreed"
"""Said by a rank that failed together with all others."""

STATIC_POLICIES = ("uniform-", "random", "layer-type", "layer-id", "none")
"""Beginnings of the policies that look at names and FLOPs only: planned once, never refreshed."""


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
        self.config = config
        self._topology = current_topology() if topology is None else topology
        self._control = self._topology.control
        self.model = PlannedModel(model, self._topology, config.seed, config.backend)
        self._optimizer = optimizer
        self._reporter: Reporter = reporter or NullReporter()
        self._leader = self._topology.rank == 0
        self._options = self._offered_options()
        self._pending: Pending | None = None
        self._unsent: Exception | None = None
        self._resumed = state
        self._refreshed = None if state is None else state.refreshed
        self.history: list[tuple[int, str]] = [] if state is None else list(state.history)
        self.plan = self._initial_plan()
        self._solver = None
        if self._leader and self._replans:
            self._solver = SolverProcess() if solver is None else solver
        self._guard = self._made_guard()
        self._topology = replace(self._topology, control=self._new_measuring_group())
        self.model.install()
        self.model.apply(self.plan.linears)
        self._log_precision(0 if state is None else state.step)
        if state is not None and state.pending is not None and self._replans:
            self._resubmit(state.pending)
        if self._static:  # the only plan that this run will report
            changed = sum(option != BF16 for option in self.plan.linears.values())
            self._tell(lambda r: r.planned(Applied(self.plan, 0, changed, 0.0)))

    # What a training loop calls.

    def begin_step(self, step: int) -> None:
        """All ranks, before step `step` (0-based): apply the pending plan if it is time."""
        if self._guard is not None:
            self._guard.hear()
        if self._pending is not None and step >= self._pending.apply_at:
            pending, self._pending = self._pending, None
            self._conclude(pending, step)

    def forward_backward(
        self, step: int, function: ForwardBackward, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """All ranks: run the step's forward-backward, measuring first where a refresh is due.

        Args:
            step: training step (0-based).
            function: Megatron's forward-backward function.
            kwargs: its keyword arguments.

        Returns:
            What `function` returns.
        """
        training = TrainingPass(function, kwargs)
        if self._due(step):
            self._refresh(step, training)
        if self._guard is not None and self._guard.watching:
            return self._watched(step, training, self._guard)
        self.model.runtime.begin_pass(step)
        results = training.train()
        if self._guard is not None:
            self._guard.noted(results)
        return results

    def end_step(self, step: int, metrics: dict[str, Any]) -> None:
        """All ranks, after step `step`: report its metrics."""
        if self._guard is not None:
            self._guard.hear()
        values = {**metrics, "lowest_precision_fraction": self.lowest_precision_fraction}
        self._tell(lambda r: r.metrics(step, values))

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context in which an evaluation runs: the plan's precision, or BF16."""
        if self.config.eval_precision == "bf16":
            return self.model.runtime.running(Mode.BF16)
        return nullcontext()

    def state(self, step: int) -> ControllerState:
        """Return what a checkpoint after `step` training steps keeps; the same on all ranks."""
        guard = None if self._guard is None else self._guard.state()
        history = tuple(self.history)
        return ControllerState(step, self.plan, history, self._refreshed, self._pending, guard)

    def close(self) -> None:
        """All ranks: put Megatron's methods back, end the solver's process, close reports."""
        self.model.uninstall()
        if self._solver is not None:
            self._solver.close()
        self._tell(lambda r: r.close())
        _let_go(self._topology.control)

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

    @property
    def _static(self) -> bool:
        """Whether the policy needs no statistics, so that its plan holds from the first step."""
        return self.config.policy.startswith(STATIC_POLICIES)

    @property
    def _replans(self) -> bool:
        """Whether refreshes lead to plans."""
        c = self.config
        return not (self._static or c.collect_only or c.freeze_plan)

    def _due(self, step: int) -> bool:
        c = self.config
        if self._static and not (c.collect_only or c.freeze_plan):
            return False
        if step < c.start_step or (c.stop_step is not None and step >= c.stop_step):
            return False
        if step == self._refreshed:  # Megatron repeats a step whose result it doubts
            return False
        if self._pending is not None:  # one that was asked for out of turn
            return False
        if self._guard is not None and step == self._guard.refresh_at:
            return True
        return (step - c.start_step) % c.interval == 0

    def _refresh(self, step: int, training: TrainingPass) -> None:
        """All ranks: measure; then rank 0 starts the solver."""
        begin = time.perf_counter()
        self._refreshed = step
        refresh = self._tried(step, training, begin)
        if refresh is None:
            return
        self._tell(lambda r: r.refreshed(refresh))
        if not self._replans:
            return
        metrics = refresh.divergences.metrics()
        self._submit(Pending(step, step + self.config.lag, refresh.problem, metrics))

    def _tried(self, step: int, training: TrainingPass, begin: float) -> Refresh | None:
        """All ranks: measure, with less where memory runs out; None if that came to nothing."""
        for parts in (1, FEWER):
            try:
                return self._together(lambda: self._measure(step, training, begin, parts))  # noqa: B023
            except RemoteFailure as failure:
                why, again = str(failure), out_of_memory(failure.failures.values())
            # Out of the handler, so that the failed attempt's tensors have no owner left.
            _free_memory()
            if not again:
                break
            if parts == 1 and self._leader:
                logger.warning(
                    "the refresh at step %d ran out of memory (%s); trying once more with "
                    "1/%d of its microbatches and sampled rows",
                    step,
                    why,
                    FEWER,
                )
        self._keep(step, f"the refresh at step {step} was given up: {why}")
        return None

    def _together(self, act: Callable[[], Refresh]) -> Refresh:
        """All ranks: measure, and agree on whether that went well on all of them.

        Raises:
            RemoteFailure: on every rank, if it did not on any.
            StrandedError: on a rank whose peers cannot be helped.
        """
        result: Refresh | None = None
        agreed: RemoteFailure | None = None
        failure: str | None = None
        try:
            result = act()
        except StrandedError:
            raise
        except RemoteFailure as error:
            agreed, failure = error, _AGREED
        except Exception as error:  # whatever it was, all ranks hear of it
            failure = f"{type(error).__name__}: {one_line(error)}"
        try:
            confirm("measuring", failure, self._control)
        except RemoteFailure as failed:
            alone = {rank: text for rank, text in failed.failures.items() if text != _AGREED}
            if agreed is not None and not alone:
                raise agreed from None
            # Somebody may have been left waiting, and what it waited on is of no use any more.
            self._topology = replace(self._topology, control=self._new_measuring_group())
            raise RemoteFailure("measuring", alone) from None
        assert result is not None, "nobody failed"
        return result

    def _measure(self, step: int, training: TrainingPass, begin: float, parts: int) -> Refresh:
        """All ranks: measure with 1 / `parts` of the microbatches and rows."""
        c = self.config
        # Agreed on first: later, peers wait for each other within Megatron's own groups.
        inputs, settings, runner = attempt(
            "preparing to measure",
            lambda: self._prepared(step, training, parts),
            self._topology.control,
        )
        statistics = measure(inputs, settings, runner)
        quality = QualitySettings(
            self._options, c.lowest_format, c.loss_join, c.weight_join, c.weight_lambda
        )
        divergences = divergence_table(statistics, quality, warn=self._leader)
        problem = self._restricted(problem_dict(divergences, c.lowest_format, c.efficiency_target))
        return Refresh(step, statistics, divergences, problem, time.perf_counter() - begin)

    def _prepared(
        self, step: int, training: TrainingPass, parts: int
    ) -> tuple[RefreshInputs, MeasureSettings, CarefulPasses]:
        c = self.config
        microbatches, num_rows = -(-c.stat_microbatches // parts), -(-c.probe_rows // parts)
        passes = MeasuringPasses(training, self.model.runtime, microbatches)
        inputs = RefreshInputs(
            linears=self.model.all_linears,
            weights=self.model.weights(),
            optimizer=self._optimizer,
            topology=self._topology,
            probe_relative_step=c.probe_relative_step,
        )
        on_offer = {name for option in self._options for name in option.formats}
        formats = tuple(name for name in c.formats if name != "bf16" and name in on_offer)
        settings = MeasureSettings(formats, step, c.seed, num_rows, c.probes)
        return inputs, settings, CarefulPasses(passes, self._topology)

    def _submit(self, pending: Pending) -> None:
        """All ranks: remember what is being solved; rank 0 starts the solver."""
        self._pending = pending
        self._unsent = None
        if self._solver is None:
            return
        try:
            self._solver.submit(
                PlanningProblem.from_dict(pending.problem),
                PlanSettings.from_config(self.config),
                self.plan,
                pending.step,
                pending.metrics,
            )
        except Exception as error:  # told to all ranks when the outcome is due
            self._unsent = error

    def _resubmit(self, pending: Pending) -> None:
        """All ranks: solve again what was being solved; stages are those of this layout."""
        stages = {linear.name: linear.stage for linear in self.model.all_linears}
        rows = pending.problem["linears"]
        if {row["name"] for row in rows} != set(stages):
            why = f"the problem of step {pending.step} is of another model"
            self._keep(pending.apply_at, why)
            return
        moved = [{**row, "stage": stages[row["name"]]} for row in rows]
        self.model.runnable.learn(Option.parse(text) for row in moved for text in row["options"])
        problem = self._restricted({**pending.problem, "linears": moved})
        self._submit(replace(pending, problem=problem))

    def _conclude(self, pending: Pending, step: int) -> None:
        """All ranks: hear the outcome from rank 0 and apply the same plan, or keep the old one."""
        begin = time.perf_counter()
        outcome = broadcast_json(self._outcome(self._solved), self._control)
        waited_s = time.perf_counter() - begin
        if "error" in outcome:
            why = f"no new plan from the statistics of step {pending.step}: {outcome['error']}"
            self._keep(step, why)
            return
        try:
            plan = attempt(
                "reading the new plan",
                lambda: self._checked(PrecisionPlan.from_dict(outcome["plan"])),
                self._control,
            )
        except RemoteFailure as failure:
            self._keep(step, str(failure))
            return
        if self._guard is not None and self._guard.refuses(plan):
            self._keep(
                step, f"the loss guard took back the very plan of step {pending.step} before"
            )
            return
        self._apply(plan, step, waited_s)

    def _outcome(self, make: Callable[[], PrecisionPlan]) -> dict[str, Any]:
        """Rank 0: {"plan"} or {"error", "usage"}, as all ranks will hear it; others nothing."""
        if not self._leader:
            return {}
        try:
            outcome = {"plan": make().to_dict()}
            json.dumps(outcome, allow_nan=False)  # what cannot be sent is an error here and now
            return outcome
        except Exception as error:  # whatever it was, all ranks hear of it
            if isinstance(error, UsageError | InfeasiblePlanError):
                return {"error": str(error), "usage": True}
            return {"error": f"{type(error).__name__}: {error}", "usage": False}

    def _solved(self) -> PrecisionPlan:
        """Rank 0: wait for the solver, at most its time limit."""
        if self._unsent is not None:
            raise self._unsent
        assert self._solver is not None
        return self._solver.result(self.config.time_limit_s + SOLVER_GRACE_S)

    def _offered_options(self) -> tuple[Option, ...]:
        """All ranks: what linears may choose from here; rank 0 warns of what they may not."""
        c, runnable = self.config, self.model.runnable
        if c.collect_only:  # statistics are wanted of what other machines can run, too
            return c.options
        runnable.learn((*c.options, Option.uniform(c.lowest_format)))
        names = [linear.name for linear in self.model.all_linears]
        options, warnings = offered(runnable, c.options, names, c.lowest_format)
        if self._leader:
            for text in warnings:
                logger.warning(text)
            for text in self.model.approximations(options):
                logger.info(text)
        return options

    def _runnable(self, plan: PrecisionPlan) -> PrecisionPlan:
        """All ranks: bring a plan from elsewhere to what can run here; rank 0 says what changed."""
        runnable = self.model.runnable
        runnable.learn((*plan.linears.values(), *self._options))
        linears = nearest(runnable, plan.linears, self._options)
        if linears == plan.linears:
            return plan
        if self._leader:
            for text in told_changes(runnable, plan.linears, linears):
                logger.warning("the %s plan of step %d: %s", plan.policy, plan.step, text)
        work = [Work(i.name, i.stage, i.flops_per_token) for i in self.model.all_linears]
        return assigned_plan(linears, work, self.config.lowest_format, plan.policy, plan.step)

    def _checked(self, plan: PrecisionPlan) -> PrecisionPlan:
        plan.check_against([linear.name for linear in self.model.all_linears])
        return plan

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
        if self._leader:
            logger.info(
                "step %d: %s plan of step %d applied: %s, efficiency %.3f (target %.3f), "
                "objective %s, %d of %d linears changed, solved in %.2f s, waited %.2f s",
                step,
                plan.policy,
                plan.step,
                plan.status,
                plan.efficiency,
                plan.target,
                "none" if plan.objective is None else f"{plan.objective:.4g}",
                len(changed),
                len(plan.linears),
                plan.seconds,
                waited_s,
            )
        if changed:
            self._log_precision(step)
        applied = Applied(plan, step, len(changed), waited_s)
        self._tell(lambda r: r.planned(applied))

    def _watched(self, step: int, training: TrainingPass, guard: PlanGuard) -> list[dict[str, Any]]:
        """All ranks: make a step whose loss decides whether the plan in force stays."""

        def run(plan: PrecisionPlan) -> list[dict[str, Any]]:
            self.model.apply(plan.linears)
            self.model.runtime.begin_pass(step)
            return training.train()

        def clear() -> None:
            for chunk in training.chunks:
                clear_buffers: Any = getattr(chunk, "zero_grad_buffer", None)
                if clear_buffers is not None:
                    clear_buffers()
            self._optimizer.zero_grad()

        judged = guard.watch(training, self.plan, self._safe_plan(step), run, clear)
        if judged.message is not None:
            self._happened(step, "guard", f"step {step}: {judged.message}")
        if judged.fallback is None:
            self.model.apply(self.plan.linears)
        else:
            self._fall_back(step, judged.fallback, guard)
        return judged.results

    def _fall_back(self, step: int, fallback: PrecisionPlan, guard: PlanGuard) -> None:
        """All ranks: `fallback`, which the step was made under, is the plan from now on."""
        self._pending = None
        if self._solver is not None:  # what it works on was measured in bad company
            with contextlib.suppress(Exception):
                self._solver.result(0.0)
        # A plan's step names its file; that of the plan it repeats is taken.
        plan = fallback.model_copy(update={"step": step})
        guard.fell(self.plan, plan, step)
        changed = changed_linears(self.plan, plan)
        was, self.plan = self.plan, plan
        self.history.append((step, plan.digest))
        self._happened(
            step,
            "fallback",
            f"the plan of step {was.step} was taken back: {len(changed)} of {len(plan.linears)} "
            f"linears are as in the {fallback.policy} plan of step {fallback.step}",
        )
        self._tell(lambda r: r.planned(Applied(plan, step, len(changed), 0.0)))

    def _safe_plan(self, step: int) -> PrecisionPlan:
        """BF16 throughout, but for pinned linears."""
        globs = [glob for glob, _ in self.config.pin_pairs]
        linears = {
            name: option if any(fnmatchcase(name, glob) for glob in globs) else BF16
            for name, option in self.plan.linears.items()
        }
        work = [Work(i.name, i.stage, i.flops_per_token) for i in self.model.all_linears]
        return assigned_plan(linears, work, self.config.lowest_format, "guard", step)

    def _made_guard(self) -> PlanGuard | None:
        """All ranks: return the guard, if plans change in this run."""
        if not (self.config.guard and self._replans):
            return None
        state = None if self._resumed is None else self._resumed.guard
        if state is not None and state.good is not None:
            state = replace(state, good=self._runnable(self._checked(state.good)))
        return PlanGuard(self.config, replace(self._topology, control=self._control), state)

    def _new_measuring_group(self) -> ProcessGroup | None:
        """All ranks: return a group of all ranks that waits `timeout` seconds."""
        if self._control is None:
            return None
        if self._topology.control is not self._control:
            _let_go(self._topology.control)
        limit = self.config.timeout
        wait = None if limit is None else timedelta(seconds=limit)
        return dist.new_group(backend="gloo", timeout=wait)  # type: ignore[no-any-return]

    def _keep(self, step: int, why: str) -> None:
        self._happened(step, "kept", f"the plan of step {self.plan.step} stays: {why}")

    def _happened(self, step: int, kind: EventKind, message: str) -> None:
        """Warn on rank 0, and report."""
        if self._leader:
            logger.warning(message)
        self._tell(lambda r: r.event(Event(step, kind, message)))

    def _log_precision(self, step: int) -> None:
        """All ranks: say what every linear resolved to from `step` on, where that is wanted."""
        if not self.config.precision_log:
            return
        table = precision_table(self.model.linears, self.plan, step, self._control)
        if self._leader:
            logger.info("%s", table.text())
        self._tell(lambda r: tell_precision(r, step, table.to_dict()))

    def _tell(self, message: Callable[[Reporter], None]) -> None:
        """Report; what goes wrong there (a full disk, say) never reaches training."""
        try:
            message(self._reporter)
        except Exception as error:
            warn_once(logger, f"reporting failed: {type(error).__name__}: {error}")

    def _initial_plan(self) -> PrecisionPlan:
        """All ranks: rank 0 makes the plan that the run starts with; the others hear of it."""
        outcome = broadcast_json(self._outcome(self._first_plan), self._control)
        if "error" in outcome:
            raise (UsageError if outcome["usage"] else SnipError)(outcome["error"])
        return self._runnable(self._checked(PrecisionPlan.from_dict(outcome["plan"])))

    def _first_plan(self) -> PrecisionPlan:
        """Rank 0: the plan file, a policy that needs no statistics, or `initial_option`.

        A resumed run goes on with its plan, unless the plan file is to be kept or the policy
        makes its plan from nothing but settings. Rules that no plan can satisfy are found here
        and not at the first refresh.
        """
        get_policy(self.config.policy)
        settings = PlanSettings.from_config(self.config)
        problem = PlanningProblem.from_dict(self._unmeasured())
        if self._replans:
            make_plan(problem, settings.model_copy(update={"policy": "greedy"}))
        keeps_file = self.config.plan_file is not None and self.config.freeze_plan
        if self._resumed is not None and not (self._static or keeps_file):
            return self._checked(self._resumed.plan)
        if self.config.plan_file is not None:
            return self._checked(read_plan(self.config.plan_file))
        if not self._static:
            initial = {"policy": f"uniform-{self.config.initial_option}", "max_changes": None}
            settings = settings.model_copy(update=initial)
        return make_plan(problem, settings)

    def _unmeasured(self) -> dict[str, Any]:
        return self._restricted(
            unmeasured_problem_dict(
                self.model.all_linears,
                self._options,
                self.config.lowest_format,
                self.config.efficiency_target,
            )
        )

    def _restricted(self, problem: dict[str, Any]) -> dict[str, Any]:
        """Return the problem with what every linear can run; in full where nothing will run it."""
        return problem if self.config.collect_only else restricted(self.model.runnable, problem)


def _let_go(group: ProcessGroup | None) -> None:
    """Close a group's connections, if it is still there."""
    if group is not None:
        with contextlib.suppress(Exception):  # one that a failure has broken
            dist.destroy_process_group(group)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
