"""Events that the controller reports, and the writers that record them.

Within an iteration `Settings` comes first, if at all, and `Metrics` last. The others
come in any order. Iterations are Megatron's (1-based).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from megatron_snip.divergence.quality_loss import DivergenceTable
from megatron_snip.errors import SnipError
from megatron_snip.log import log_failure, warn_once
from megatron_snip.planning.plan import PrecisionPlan, shares_text
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.reporting.precision_record import PrecisionRecord
from megatron_snip.statistics.health_table import HealthTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measurement:
    """A refresh has measured every linear.

    Attributes:
        divergences: The model's divergences, and the statistics that they were computed from.
        problem: The planning problem.
        seconds: Wall time that measuring added.
        health: What quantization does to the tensors of the measured iterations.
        gradient_noise: That of the plan that ran (`HealthTable.gradient_noise`); None if unknown.
        watched: Linears that dashboards have series of; the same ones in all refreshes of a run.
    """

    divergences: DivergenceTable
    problem: PlanningProblem
    seconds: float
    health: HealthTable
    gradient_noise: float | None = None
    watched: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanApplied:
    """Every rank runs this plan from the event's iteration on.

    Attributes:
        plan: The plan.
        format_shares: Share of the linears' FLOPs in each format, lowest precision first.
        num_changed: Number of linears whose option changed.
        waited_s: Seconds that training waited for the solver.
        resumed: Whether a resumed run continues with its plan.
        resolved: What every linear runs.
        saving_s: Predicted seconds that the plan saves in each step against BF16, or None.
    """

    plan: PrecisionPlan
    format_shares: dict[str, float]
    num_changed: int
    waited_s: float = 0.0
    resumed: bool = False
    resolved: PrecisionRecord | None = None
    saving_s: float | None = None

    @property
    def summary(self) -> str:
        """The event in a log line."""
        plan = self.plan
        result = "plan unchanged"
        if self.num_changed:
            result = f"plan applied, {self.num_changed} of {len(plan.linears)} linears changed"
        shares = shares_text(self.format_shares)
        text = f"{result}: {shares}, solver {plan.seconds:.2f} s ({plan.status})"
        if self.saving_s is not None:
            text += f", predicted saving {1e3 * self.saving_s:.3g} ms of a step against bf16"
        return text


NoticeKind = Literal["refresh_failed", "guard", "reverted", "health"]
"""refresh_failed: the plan stays. guard: the guard saw a spike of the loss, or NaN. reverted: the
guard reverted a plan. health: linears are beyond a threshold of `--snip-alert`, or the gradient is
below the noise of the plan."""


@dataclass(frozen=True)
class Notice:
    """Something unusual; `message` is one line."""

    kind: NoticeKind
    message: str


@dataclass(frozen=True)
class Metrics:
    """An iteration has ended.

    Attributes:
        values: Values by name: loss, grad_norm, lr and others, as the training loop measured them.
        is_addition: Whether the values belong to the iteration that was reported last: evaluations
            after the end of training.
    """

    values: dict[str, Any]
    is_addition: bool = False


@dataclass(frozen=True)
class Settings:
    """The run follows other settings than its writers were made with.

    Attributes:
        values: SNIP's settings as plain values, with the target that the linears can reach.
        fixed: How many linears have a fixed option, by what fixes them, with an example of each.
    """

    values: dict[str, Any]
    fixed: dict[str, dict[str, Any]] = field(default_factory=dict)


Payload = PlanApplied | Measurement | Notice | Metrics | Settings


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        iteration: Megatron's iteration, 1-based.
        payload: What happened in it.
    """

    iteration: int
    payload: Payload


class Writer(Protocol):
    """Records events somewhere. May raise; training continues without the writer."""

    def write(self, event: Event) -> None:
        """Record one event; iterations never decrease."""

    def close(self) -> None:
        """Flush; the run has ended."""


class Reporter:
    """Logs, and passes events to writers. A writer that raises loses that record, nothing else."""

    def __init__(self, writers: Sequence[Writer] = (), logs: bool = True) -> None:
        """`logs` is False on the ranks that do not log."""
        self._writers = tuple(writers)
        self._logs = logs

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Log one line."""
        if self._logs:
            logger.log(level, "snip: %s", text)

    def warn(self, text: str) -> None:
        """Log one line as a warning."""
        self.log(text, logging.WARNING)

    def notify(self, iteration: int, kind: NoticeKind, text: str) -> None:
        """Warn of something unusual, and pass it to every writer."""
        self.warn(f"iteration {iteration}: {text}")
        self.write(Event(iteration, Notice(kind, text)))

    def write(self, event: Event) -> None:
        """Pass an event to every writer."""
        for writer in self._writers:
            self._guarded(writer, partial(writer.write, event))

    def flush(self, limit_s: float | None = None) -> None:
        """Wait for writers that work in a thread of their own, each at most `limit_s` seconds."""
        for writer in self._writers:
            flush = getattr(writer, "flush", None)
            if flush is not None:
                self._guarded(writer, flush if limit_s is None else partial(flush, limit_s))

    def close(self) -> None:
        """Close every writer."""
        for writer in self._writers:
            self._guarded(writer, writer.close)

    def _guarded(self, writer: Writer, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a full disk, for example; it may have space again later
            name = type(writer).__name__
            line = log_failure(logger, name, error)
            if isinstance(error, SnipError):  # its line says all: it has no traceback
                warn_once(logger, f"snip: {name} failed: {line}")
