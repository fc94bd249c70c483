"""Announcer: says on rank 0 what is decided, and passes it on to the reporter.

A reporter that fails (a full disk, say) is warned of once and never reaches training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_snip.linears.precision_log import PrecisionTable
from megatron_snip.log import warn_once
from megatron_snip.reporting.reporter import (
    Applied,
    Event,
    EventKind,
    NullReporter,
    Reporter,
    tell_precision,
)

logger = logging.getLogger(__name__)


class Announcer:
    """One rank's voice; ranks other than 0 log nothing, and mostly have no reporter."""

    def __init__(self, reporter: Reporter | None, leader: bool) -> None:
        """Args are who listens here, and whether this is rank 0."""
        self.reporter: Reporter = reporter or NullReporter()
        self._leader = leader

    def tell(self, message: Callable[[Reporter], None]) -> None:
        """Pass a message on to the reporter."""
        try:
            message(self.reporter)
        except Exception as error:
            warn_once(logger, f"reporting failed: {type(error).__name__}: {error}")

    def warn(self, text: str) -> None:
        """Warn on rank 0."""
        if self._leader:
            logger.warning("%s", text)

    def info(self, text: str) -> None:
        """Say on rank 0."""
        if self._leader:
            logger.info("%s", text)

    def happened(self, step: int, kind: EventKind, message: str) -> None:
        """Something is out of the ordinary: warn, and report it."""
        self.warn(message)
        self.tell(lambda r: r.event(Event(step, kind, message)))

    def applied(self, applied: Applied) -> None:
        """A plan of the solver has been applied."""
        plan, objective = applied.plan, applied.plan.objective
        self.info(
            f"step {applied.step}: {plan.policy} plan of iteration {plan.iteration} applied: "
            f"{plan.status}, efficiency {plan.efficiency:.3f} (target {plan.target:.3f}), "
            f"objective {'none' if objective is None else f'{objective:.4g}'}, "
            f"{applied.num_changed} of {len(plan.linears)} linears changed, "
            f"solved in {plan.seconds:.2f} s, waited {applied.waited_s:.2f} s"
        )
        self.tell(lambda r: r.planned(applied))

    def precision(self, step: int, table: PrecisionTable) -> None:
        """Every linear resolves to this from `step` on."""
        self.info(table.text())
        self.tell(lambda r: tell_precision(r, step, table.to_dict()))
