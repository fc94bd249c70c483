"""Runs with a fault in every refresh, on whichever rank, and what must hold of them.

A strike stands in for a call of the product: it gets the call that would have been made, and
raises, or returns what then counts as the call's result.
"""

import errno
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_snip.errors import InfeasiblePlanError
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.reporting import run_directory
from megatron_snip.reporting.events import Event
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.run import observation
from megatron_snip.statistics import observer, reduce
from megatron_snip.trainer.loop import stop_requests
from tests.distributed.layouts import OVERLAP, PP2, TP2, OnRanks
from tests.distributed.small_model import NARROW, Trainer, layout

EVERY_PHASE = "tests.distributed.faulty_runs:every_phase"
LAYOUTS: dict[str, dict[str, Any]] = {"tp": TP2, "pp": PP2, "dp": OVERLAP}
SNIP: dict[str, Any] = {"interval": 2, "start_step": 1, "lag": 1, "efficiency_target": 0.5}
SNIP |= {"formats": "fp8,fp4", "pins": ("*.linear_qkv=bf16",)}
"""Refreshes at odd iterations; their plans are due before the even ones."""

Strike = Callable[[Callable[[], Any]], Any]


def bug(call: Callable[[], Any]) -> Any:
    raise RuntimeError("a bug")


def half_done(call: Callable[[], Any]) -> Any:
    call()
    raise RuntimeError("a bug")


def no_memory(call: Callable[[], Any]) -> Any:
    raise torch.OutOfMemoryError("tried to allocate 1.00 EiB")


def kill(call: Callable[[], Any]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def infeasible(call: Callable[[], Any]) -> Any:
    call()
    raise InfeasiblePlanError("no plan satisfies: target 0.5")


def of_another_model(call: Callable[[], Any]) -> Any:
    plan = call()
    linears = dict(list(plan.linears.items())[1:])
    return plan.model_copy(update={"linears": linears, "digest": assignment_digest(linears)})


def with_options(**options: str) -> Strike:
    """The solver's plan with another option at the linears whose names end so."""

    def strike(call: Callable[[], Any]) -> Any:
        plan = call()
        linears = dict(plan.linears)
        for ending, option in options.items():
            linears |= {n: Option.uniform(option) for n in linears if n.endswith(ending)}
        return plan.model_copy(update={"linears": linears, "digest": assignment_digest(linears)})

    return strike


def boastful(call: Callable[[], Any]) -> Any:
    return call().model_copy(update={"efficiency": 1.0})


def damaged(call: Callable[[], Any]) -> Any:
    return call().model_copy(update={"digest": "0" * 64})


def not_a_number(call: Callable[[], Any]) -> Any:
    """Fill the tensors of a record with NaN."""
    result = call()
    return result._make(t * math.nan if torch.is_tensor(t) else t for t in result)


GRADIENTS = (observation, "gradient_norms")
FORWARD = (observer, "rows_of")
BACKWARD = (observer, "operand_sums")
REDUCE = (reduce, "_fill")
PROBLEM = (observation, "divergence_table")
SUBMIT = (SolverProcess, "submit")
SOLVE = (SolverProcess, "result")
BROADCAST = (PrecisionPlan, "from_dict")
APPLY = (PlannedModel, "apply")
Place = tuple[Any, str]
"""Whose attribute it is, and its name."""

PLACES: dict[str, tuple[Place, Strike]] = {
    "gradients": (GRADIENTS, bug),
    "gradients memory": (GRADIENTS, no_memory),
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
    "pin": (SOLVE, with_options(linear_qkv="fp4")),
    "option": (SOLVE, with_options(linear_proj="fp3")),
    "target": (SOLVE, with_options(linear_fc1="fp8", linear_fc2="fp8", linear_proj="fp8")),
    "numbers": (SOLVE, boastful),
    "broadcast": (BROADCAST, bug),
    "apply": (APPLY, half_done),
}
"""Faults after which all ranks keep the old plan. They strike on the last rank; the solver is on
rank 0."""

PHASES = ("forward", "backward", "gradients", "reduce", "problem", "solve", "broadcast", "apply")
_LATE = (SUBMIT, SOLVE, BROADCAST, APPLY)
MEASURED = ("NaN", *(fault for fault, (place, _) in PLACES.items() if place in _LATE))
"""Faults of refreshes that have measured."""


class Faults:
    """Strikes at `now`; every other call passes through."""

    def __init__(self, places: dict[str, tuple[Place, Strike]]) -> None:
        self.signals = False  # whether SIGTERM comes once in every phase of a cycle
        self.signalled: list[str] = []  # phases in which it came
        self._places = places
        self.at("")

    def at(self, fault: str, once: bool = False) -> None:
        """Be ready for `fault` ("" for none), at its first call alone or at every one."""
        self.now = fault
        self.once = once
        self._struck = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:  # which undoes the last first
            for fault, ((owner, name), strike) in self._places.items():
                striking = self._striking(fault, owner.__dict__[name], strike)
                stack.enter_context(mock.patch.object(owner, name, striking))
            yield

    def _striking(self, fault: str, before: Any, strike: Strike) -> Any:
        method = isinstance(before, classmethod)
        call = before.__func__ if method else before

        def maybe(*args: Any, **kwargs: Any) -> Any:
            if self.signals and fault in PHASES and fault not in self.signalled:
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


def every_phase(values: dict[str, Any], folder: str) -> dict[str, Any]:
    """On ranks: a run with a fault in every refresh, and the run without SNIP."""
    faults = Faults(PLACES)
    outcomes: dict[str, Any] = {}
    late = LateWriter()
    with layout({**NARROW, **values}) as trainer, faults.installed():
        controller = trainer.controller(SNIP, writers=[late])
        initial = controller.plan.digest
        for fault in PLACES:
            outcomes[fault] = _strike(trainer, controller, faults, fault)
        kept = controller.plan.digest == initial
        run = trainer.digests()
        steps = trainer.step
        healed = _healed(trainer, controller, faults)
        full = _full_disk(trainer, controller, late, Path(folder))
        controller.close()
    with layout({**NARROW, **values}) as trainer:
        trainer.advance(steps)
        plain = trainer.digests()
    found = {"outcomes": outcomes, "healed": healed, "steps": steps, "full disk": full}
    return {**found, "kept": kept, "run": run, "plain": plain}


def killed(values: dict[str, Any], phase: str) -> None:
    """On ranks: the last one, or the solver's, is killed in a phase of the first refresh."""
    faults = Faults({phase: (PLACES[phase][0], kill)})
    with layout({**NARROW, **values}) as trainer, faults.installed():
        controller = trainer.controller(SNIP)
        faults.at(phase)
        trainer.advance(2, controller)


def _strike(trainer: Trainer, controller: Any, faults: Faults, fault: str) -> dict[str, Any]:
    """One cycle of two steps with a fault in it."""
    warned, noticed = len(trainer.warnings), len(trainer.events.notices)
    refreshed = len(trainer.events.measured)
    faults.at(fault, once=fault == "apply")
    trainer.advance(2, controller)
    faults.at("")
    return {
        "warnings": trainer.warnings[warned:],
        "events": [notice.kind for _, notice in trainer.events.notices[noticed:]],
        "measured": len(trainer.events.measured) - refreshed,
        "history": list(controller.history),
    }


def _healed(trainer: Trainer, controller: Any, faults: Faults) -> dict[str, Any]:
    """A cycle that succeeds, though SIGTERM comes in every phase."""
    control = controller.model.runtime.topology.control
    with stop_requests(control) as agreed:
        faults.signals = True
        trainer.advance(2, controller)
        faults.signals = False
        stop_signal = agreed()
    signalled = control.gather("counting signals", lambda: faults.signalled).values
    return {
        "history": list(controller.history),
        "digest": controller.plan.digest,
        "refreshed": trainer.events.measured[-1][0],
        "stop_signal": stop_signal,
        "signalled": sorted({phase for each in signalled for phase in each}),
    }


class LateWriter:
    """Passes events on, once it has a writer."""

    writer: RunDirectory | None = None

    def write(self, event: Event) -> None:
        if self.writer is not None:
            self.writer.write(event)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _full_disk(trainer: Trainer, controller: Any, late: LateWriter, folder: Path) -> dict[str, Any]:
    """A cycle in which rank 0 finds the disk full whenever the run's files are written."""
    if dist.get_rank() == 0:
        late.writer = RunDirectory(folder)
    warned = len(trainer.warnings)
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(run_directory, "write_plan", side_effect=full),
        mock.patch.object(run_directory, "write_atomic", side_effect=full),
    ):
        trainer.advance(2, controller)
    return {
        "history": list(controller.history),
        "warnings": trainer.warnings[warned:],
        "plans": sorted(p.name for p in folder.glob("plans/*")),
    }


REASONS = {
    "gradients": "measuring failed on LAST: RuntimeError: a bug",
    "gradients memory": "measuring failed on LAST: OutOfMemoryError",
    "forward": "measuring failed on LAST: ",
    "backward": "measuring failed on LAST: ",
    "backward memory": "OutOfMemoryError: tried to allocate",
    "reduce": "measuring failed on LAST: RuntimeError: a bug",
    "problem": "making a planning problem failed on LAST: RuntimeError: a bug",
    "NaN": "no plan for the problem of iteration ",
    "submit": "RuntimeError: a bug",
    "solve": "RuntimeError: a bug",
    "infeasible": "efficiency_target: no plan satisfies: target 0.5",
    "another model": "the plan does not have",
    "damaged": "the digest does not match the assignment",
    "pin": "has fp4, and pin *.linear_qkv demands bf16",
    "option": "has no option 'fp3'",
    "target": "is below the target 0.5",
    "numbers": "efficiency 1.0 is not that of the assignment",
    "broadcast": "applying the plan failed on LAST: RuntimeError: a bug",
    "apply": "applying the plan failed on LAST: RuntimeError: a bug",
}


def check_training(phases: OnRanks, name: str) -> None:
    """Training is bitwise as if no refresh had been tried."""
    for result in phases(name):
        assert result["kept"]
        assert result["run"] == result["plain"]
        assert len(result["run"]["losses"]) == result["steps"]


def check_log(phases: OnRanks, name: str, fault: str) -> None:
    """A fault is logged once, by one rank."""
    outcome, *others = (result["outcomes"][fault] for result in phases(name))
    *forbidden, last = outcome["warnings"]
    assert all("no finite quality loss for " in text for text in forbidden)
    assert len(forbidden) == (fault == "NaN")
    assert ": keeping the uniform-bf16 plan of iteration 0: " in last
    assert REASONS[fault].replace("LAST", f"rank {len(others)}") in last
    assert outcome["events"] == ["refresh_failed"]
    assert outcome["history"] == []
    # A refresh that failed leaves nothing for its successor.
    assert outcome["measured"] == (1 if fault in MEASURED else 0)
    assert all(other == {**outcome, "warnings": []} for other in others)


def check_next_refresh(phases: OnRanks, name: str) -> None:
    """It succeeds, though a signal comes in every phase."""
    leader, *others = (result["healed"] for result in phases(name))
    assert all(other == leader for other in others)
    steps = phases(name)[0]["steps"]
    assert leader["history"] == [[steps + 2, leader["digest"]]]
    assert leader["refreshed"] == steps + 1
    assert (leader["stop_signal"], leader["signalled"]) == ("SIGTERM", sorted(PHASES))


def check_full_disk(phases: OnRanks, name: str) -> None:
    """A full disk costs files and nothing else."""
    leader, *others = (result["full disk"] for result in phases(name))
    steps = phases(name)[0]["steps"]
    assert [step for step, _ in leader["history"]] == [steps + 2, steps + 4]
    assert leader["plans"] == []
    (failure,) = leader["warnings"]  # no traceback: a full disk is no fault of the code
    assert "LateWriter failed: OSError: [Errno 28] No space left on device" in failure
    assert all(other == {**leader, "warnings": []} for other in others)
