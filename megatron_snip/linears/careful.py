"""CarefulPasses: a measuring pass that fails on a rank ends as a failure that all ranks hear of.

Observers keep their own errors. This file is about the rest of a pass: Megatron's forward and
backward, run once more with what measuring holds in memory. What can be promised depends on who
waits for the rank that fails:

    nobody (data-parallel ranks alone)                the pass ends, all ranks agree that it failed
    tensor-parallel peers, out of memory              the same: they hold shards of equal size and
                                                      run out together; if one alone does, the
                                                      others wait until their group's own timeout
    peers, anything else; pipeline, context or        peers sit in a collective of Megatron's that
    expert peers, memory                              nobody can end: `StrandedError`, which ends
                                                      the rank at once, so that the launcher ends
                                                      the job and the scheduler starts it again
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_snip.errors import SnipError
from megatron_snip.linears.passes import MeasuringPasses
from megatron_snip.statistics.refresh import PassResult
from megatron_snip.statistics.tap import Observer
from megatron_snip.topology import Topology

_SIGNS = ("outofmemoryerror", "out of memory", "can't allocate memory", "memoryerror")


class StrandedError(SnipError):
    """A rank failed inside of Megatron's forward-backward while peers wait for it there."""


def out_of_memory(texts: Iterable[str]) -> bool:
    """Whether any of these errors (`type: message`) says that memory ran out."""
    return any(sign in text.lower() for text in texts for sign in _SIGNS)


class CarefulPasses:
    """`MeasuringPasses` whose failures become the observer's; see `PassRunner`."""

    def __init__(self, passes: MeasuringPasses, topology: Topology) -> None:
        """Args are the passes, and who waits for this rank."""
        self._passes = passes
        self._topology = topology

    @property
    def num_microbatches(self) -> int:
        """Microbatches a data rank in each pass."""
        return self._passes.num_microbatches

    @property
    def grad_scale(self) -> float:
        """Factor from G as the linears see it to the gradient of the batch-mean loss."""
        return self._passes.grad_scale

    def prepare(self) -> None:
        """All ranks: finish what is under way."""
        self._passes.prepare()

    def finish(self) -> None:
        """Take the spare memory back."""
        self._passes.finish()

    def run(self, observer: Observer) -> PassResult:
        """All ranks: run one pass; a failure is noted in `observer.failure`.

        Raises:
            StrandedError: if peers wait for this rank.
        """
        noting: Any = observer
        try:
            return self._passes.run(observer)
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if self._stranding(text):
                raise StrandedError(
                    f"a measuring pass failed in Megatron's forward-backward ({text[:300]}); other "
                    "ranks wait for this one there, so the job cannot go on"
                ) from error
            noting.failure = noting.failure or text
        return PassResult(0.0, 0)

    def _stranding(self, text: str) -> bool:
        if self._topology.num_stages > 1 or self._topology.entangled > 1:
            return True
        return self._topology.tensor.size > 1 and not out_of_memory([text])
