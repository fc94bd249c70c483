"""Session: what the seams of one process share.

Megatron may train several times in one process (in-process restart); `end` lets go of a training
run and leaves the session as it was made.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the controller imports Megatron; without --snip nothing needs it
    from megatron_snip.controller import SnipController
    from megatron_snip.patches.step_metrics import StepMetrics

logger = logging.getLogger(__name__)


class Session:
    """State between the seams.

    Attributes:
        given: `--snip-*` flags as they stood on the command line when the seams were installed,
            by namespace attribute.
        controller: attached to the model, or None.
        loaded: SNIP's state in the checkpoint that Megatron has loaded, or None.
        metrics: collects what the seams learn of a step; None without a controller.
    """

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.controller: SnipController | None = None
        self.loaded: dict[str, Any] | None = None
        self.metrics: StepMetrics | None = None

    def end(self) -> None:
        """Close the controller, if there is one, and forget the run."""
        controller, self.controller = self.controller, None
        self.loaded = None
        self.metrics = None
        if controller is not None:
            controller.close()
