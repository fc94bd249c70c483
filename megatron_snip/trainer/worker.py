"""The process of one rank: what must be set before torch is imported, and how failures are told.

`python -m megatron_snip.trainer.worker CONFIG.json` is what the front process starts; under
torchrun the command line calls `train_as_rank` itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_snip.errors import SnipError, UsageError
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.failure import write_failure
from megatron_snip.trainer.launch import set_environment, write_stopped

if TYPE_CHECKING:
    from megatron_snip.trainer.loop import TrainingResult

_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


SIGNAL_NAMES = frozenset(number.name for number in signal.Signals)


def train_as_rank(config: TrainConfig) -> TrainingResult:
    """Every rank of a launcher: prepare the process and run; see `session.run_rank`.

    Raises:
        UsageError: if the run's input is bad; every rank raises.
        SnipError: if a rank cannot go on.
    """
    set_environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    _quiet_upstream()
    from megatron_snip.trainer.session import run_rank

    return run_rank(config)


def main(arguments: list[str]) -> int:
    """Be a rank that the front process has started; tell it why, if the run fails."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    _end_with_parent()
    try:
        file = Path(arguments[0])
        values: dict[str, Any] = json.loads(file.read_text())
        result = train_as_rank(make_train_config(values))
        if result.stopped in SIGNAL_NAMES:
            write_stopped(file.parent, result.stopped)
    except UsageError as error:
        write_failure("usage", str(error))
        return 2
    except SnipError as error:
        write_failure("error", str(error))
        return 1
    except Exception:
        write_failure("crash", traceback.format_exc())
        return 1
    return 0


def _quiet_upstream() -> None:
    """Silence what Megatron and torch say of each other and no user can act on."""
    # Told once a module: Transformer Engine and Apex are absent, some settings are deprecated.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r".torch\.distributed\..* is deprecated")
    # Megatron's checkpoints describe their tensors in torch's older way.
    warnings.filterwarnings("ignore", message=r"Please use DTensor instead")
    # The distributed optimizer looks at .grad of its views of FP32 parameters.
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
    )


def _end_with_parent() -> None:
    """Ask Linux to end this rank if the front process is killed, so that none is left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End by way of `finally`, so that files are closed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
