"""Where a refresh can fail, phase by phase, and a hook that lets it fail there.

A strike stands in for a call of the product: it gets the call that would have been made, and
raises, or returns what then counts as the call's result.
"""

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_snip import refresh
from megatron_snip.errors import InfeasiblePlanError
from megatron_snip.linears.model import PlannedModel
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.statistics import observer, reduce
from megatron_snip.statistics.optimizer_state import _ShardSums

Strike = Callable[[Callable[[], Any]], Any]


def bug(call: Callable[[], Any]) -> Any:
    raise RuntimeError("a bug")


def half_done(call: Callable[[], Any]) -> Any:
    call()
    raise RuntimeError("a bug")


def no_memory(call: Callable[[], Any]) -> Any:
    raise torch.OutOfMemoryError("tried to allocate 1.00 EiB")


def killed(call: Callable[[], Any]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def infeasible(call: Callable[[], Any]) -> Any:
    call()
    raise InfeasiblePlanError("no plan satisfies: target 0.5")


def of_another_model(call: Callable[[], Any]) -> Any:
    plan = call()
    linears = dict(list(plan.linears.items())[1:])
    return plan.model_copy(update={"linears": linears, "digest": assignment_digest(linears)})


def damaged(call: Callable[[], Any]) -> Any:
    return call().model_copy(update={"digest": "0" * 64})


def not_a_number(call: Callable[[], Any]) -> Any:
    """Fill the tensors of a record with NaN."""
    result = call()
    return result._make(t * math.nan if torch.is_tensor(t) else t for t in result)


MOMENTS = (_ShardSums, "of")
FORWARD = (observer, "rows_of")
BACKWARD = (observer, "partial_sums")
REDUCE = (reduce, "_fill")
PROBLEM = (refresh, "divergence_table")
SUBMIT = (SolverProcess, "submit")
SOLVE = (SolverProcess, "result")
BROADCAST = (PrecisionPlan, "from_dict")
APPLY = (PlannedModel, "apply")
Place = tuple[Any, str]
"""Whose attribute it is, and its name."""

PLACES: dict[str, tuple[Place, Strike]] = {
    "moments": (MOMENTS, bug),
    "moments memory": (MOMENTS, no_memory),
    "forward": (FORWARD, bug),
    "backward": (BACKWARD, bug),
    "backward memory": (BACKWARD, no_memory),
    "reduce": (REDUCE, bug),
    "problem": (PROBLEM, bug),
    "NaN": (BACKWARD, not_a_number),
    "submit": (SUBMIT, bug),
    "solve": (SOLVE, half_done),  # a result that is not taken would block the next submit
    "infeasible": (SOLVE, infeasible),
    "another model": (SOLVE, of_another_model),
    "damaged": (SOLVE, damaged),
    "broadcast": (BROADCAST, bug),
    "apply": (APPLY, half_done),
}
"""Faults after which all ranks keep the old plan. They strike on the last rank; the solver is on
rank 0."""

PHASES = ("moments", "forward", "backward", "reduce", "problem", "solve", "broadcast", "apply")
_LATE = (SUBMIT, SOLVE, BROADCAST, APPLY)
MEASURED = ("NaN", *(fault for fault, (place, _) in PLACES.items() if place in _LATE))
"""Faults of refreshes that have measured."""

KILLED: dict[str, tuple[Place, Strike]] = {
    f"killed at {phase}": (PLACES[phase][0], killed) for phase in PHASES
}


class Faults:
    """Strikes at `now`; every other call passes through."""

    def __init__(self, places: dict[str, tuple[Place, Strike]]) -> None:
        self.signalled: list[str] = []  # phases in which `signals` has sent SIGTERM
        self._places = places
        self._signals = False
        self.at("")

    def at(self, fault: str, once: bool = False) -> None:
        """Be ready for `fault` ("" for none), at its first call alone or at every one."""
        self.now, self.once, self._struck = fault, once, 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:  # which undoes the last first
            for fault, ((owner, name), strike) in self._places.items():
                striking = self._striking(fault, owner.__dict__[name], strike)
                stack.enter_context(mock.patch.object(owner, name, striking))
            yield

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Within, SIGTERM comes once in every phase of a cycle."""
        self._signals = True
        try:
            yield
        finally:
            self._signals = False

    def _striking(self, fault: str, before: Any, strike: Strike) -> Any:
        method = isinstance(before, classmethod)
        call = before.__func__ if method else before

        def maybe(*args: Any, **kwargs: Any) -> Any:
            if self._signals and fault in PHASES and fault not in self.signalled:
                self.signalled.append(fault)
                os.kill(os.getpid(), signal.SIGTERM)
            if self.now == fault and self._here(fault) and not (self.once and self._struck):
                self._struck += 1
                return strike(lambda: call(*args, **kwargs))
            return call(*args, **kwargs)

        return classmethod(maybe) if method else maybe

    def _here(self, fault: str) -> bool:
        on_leader = self._places[fault][0] in (SOLVE, SUBMIT)
        return dist.get_rank() == (0 if on_leader else dist.get_world_size() - 1)
