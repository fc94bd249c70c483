"""Saver: after every step, whether to write a checkpoint and whether to stop."""

from __future__ import annotations

from collections.abc import Callable

from megatron_snip.state import ControllerState
from megatron_snip.trainer.checkpoint import Checkpoints, Progress
from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.stop import StopRequests

EXIT_INTERVAL = "exit_interval"


class Saver:
    """Acts between two steps, on all ranks together."""

    def __init__(
        self,
        config: TrainConfig,
        checkpoints: Checkpoints,
        requests: StopRequests,
        snip_state: Callable[[int], ControllerState | None],
    ) -> None:
        """Bring together what a decision needs.

        Args:
            config: the run's settings.
            checkpoints: writes them.
            requests: signals received.
            snip_state: returns SNIP's state after so many steps.
        """
        self._config = config
        self._checkpoints = checkpoints
        self._requests = requests
        self._snip_state = snip_state

    def after_step(
        self, step: int, first_validation_loss: float | None, validation_loss: float | None
    ) -> str | None:
        """All ranks: save where it is due; return why to stop now, or None to go on.

        Args:
            step: training steps done.
            first_validation_loss: before the first step.
            validation_loss: of the last evaluation.
        """
        config = self._config
        stop = self._requests.agreed() if config.save is not None else None
        if stop is None and config.exit_interval and step % config.exit_interval == 0:
            stop = EXIT_INTERVAL
        last = step >= config.train_iters
        due = config.save_interval is not None and step % config.save_interval == 0
        if config.save is not None and (due or last or stop is not None):
            state = self._snip_state(step)
            self._checkpoints.save(Progress(step, first_validation_loss, validation_loss, state))
        return None if last else stop
