"""Agreement: whatever fails on one rank while all measure has failed on every rank.

    measuring    a group of all ranks that waits `timeout` seconds; a rank that fails on its own, or
                 comes too late, leaves the others waiting here, and they give up
    control      another one, over which all of them then agree on what became of it

A group that somebody gave up waiting in is of no use any more, so it is made anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_snip.collectives import RemoteFailure, confirm, one_line
from megatron_snip.linears.careful import StrandedError

T = TypeVar("T")

_AGREED = "agreed"
"""Said by a rank that failed together with all others."""


class Agreement:
    """The two groups; None each where there is one rank.

    Attributes:
        control: carries votes; only ever used by all ranks in the same order.
        measuring: carries a refresh; look it up at each, for it may be another one.
    """

    def __init__(self, control: ProcessGroup | None, timeout_s: float | None) -> None:
        """All ranks: make the measuring group.

        Args:
            control: of all ranks.
            timeout_s: seconds that ranks wait for each other in a refresh; None for torch's own.
        """
        self.control = control
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self.measuring = self._made()

    def together(self, act: Callable[[], T]) -> T:
        """All ranks: measure, and agree on whether that went well on all of them.

        Raises:
            RemoteFailure: on every rank, if it did not on any.
            StrandedError: on a rank whose peers cannot be helped.
        """
        result: T | None = None
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
            confirm("measuring", failure, self.control)
        except RemoteFailure as failed:
            alone = {rank: text for rank, text in failed.failures.items() if text != _AGREED}
            if agreed is not None and not alone:
                raise agreed from None
            # Somebody may have been left waiting.
            self.close()
            self.measuring = self._made()
            raise RemoteFailure("measuring", alone) from None
        assert result is not None, "nobody failed"
        return result

    def close(self) -> None:
        """All ranks: let go of the measuring group."""
        group, self.measuring = self.measuring, None
        if group is not None:
            with contextlib.suppress(Exception):  # one that a failure has broken
                dist.destroy_process_group(group)

    def _made(self) -> ProcessGroup | None:
        if self.control is None:
            return None
        return dist.new_group(backend="gloo", timeout=self._timeout)  # type: ignore[no-any-return]
