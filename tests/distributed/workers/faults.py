"""What test_faults.py runs on ranks: refreshes that fail at every phase of a cycle."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_snip.collectives import RemoteFailure, gather_json
from megatron_snip.reporting import run_directory
from megatron_snip.reporting.events import Reporter
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.trainer import checkpoint
from megatron_snip.trainer.checkpoint import Progress, latest_iteration, save_checkpoint
from megatron_snip.trainer.loop import stop_requests
from tests.distributed.workers.controller import MODEL
from tests.distributed.workers.fault_places import KILLED, PLACES, Faults
from tests.distributed.workers.small_model import Trainer, layout

SNIP: dict[str, Any] = {"interval": 2, "start_step": 1, "lag": 1, "efficiency_target": 0.5}
"""Refreshes at odd iterations; their plans are due before the even ones."""


def every_phase(layouts: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """For each layout: one run with a fault in every refresh, and the run without SNIP."""
    return {name: _faulty_run(values, Path(folder) / name) for name, values in layouts.items()}


def killed(values: dict[str, Any], phase: str) -> None:
    faults = Faults(KILLED)
    with layout({**MODEL, **values}) as trainer, faults.installed():
        controller = trainer.controller(SNIP)
        faults.at(f"killed at {phase}")
        trainer.advance(2, controller)


def _faulty_run(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    faults = Faults(PLACES)
    outcomes: dict[str, Any] = {}
    with layout({**MODEL, **values}) as trainer, faults.installed():
        controller = trainer.controller(SNIP)
        initial = controller.plan.digest
        for fault in PLACES:
            _strike(trainer, controller, faults, fault, outcomes)
        result = {**trainer.digests(), "kept": controller.plan.digest == initial}
        steps = trainer.step
        healed = _healed(trainer, controller, faults)
        saved = _saving(trainer, controller, folder)
        controller.close()
    with layout({**MODEL, **values}) as trainer:
        trainer.advance(steps, trainer.plain())
        plain = trainer.digests()
    found = {"outcomes": outcomes, "healed": healed, "steps": steps, "saved": saved}
    return {**found, "run": result, "plain": plain}


def _strike(trainer: Trainer, controller: Any, faults: Faults, fault: str, outcomes: Any) -> None:
    """One cycle of two steps with a fault in it."""
    warned, noticed = len(trainer.warnings), len(trainer.events.notices)
    refreshed = len(trainer.events.measured)
    faults.at(fault, once=fault == "apply")
    trainer.advance(2, controller)
    faults.at("")
    outcomes[fault] = {
        "warnings": trainer.warnings[warned:],
        "events": [notice.kind for _, notice in trainer.events.notices[noticed:]],
        "measured": len(trainer.events.measured) - refreshed,
        "history": list(controller.history),
    }


def _healed(trainer: Trainer, controller: Any, faults: Faults) -> dict[str, Any]:
    """A cycle that succeeds, though SIGTERM comes in every phase."""
    with stop_requests(controller._control) as agreed, faults.signals():
        trainer.advance(2, controller)
        stop_signal = agreed()
    faults.at("")
    signalled = gather_json(faults.signalled, controller._control)
    return {
        "history": list(controller.history),
        "digest": controller.plan.digest,
        "refreshed": trainer.events.measured[-1][0],
        "stop_signal": stop_signal,
        "signalled": sorted({phase for each in signalled for phase in each}),
    }


def _saving(trainer: Trainer, controller: Any, folder: Path) -> dict[str, Any]:
    """Full disks: under the run's files for a cycle, then under a checkpoint; then none is full."""
    failing = [(run_directory, "write_plan"), (run_directory, "write_atomic")]
    if dist.get_rank() == 0:
        files = RunDirectory(folder / "run")
        controller._reporter = Reporter([files, trainer.events])
    warned = len(trainer.warnings)
    with _full_disk(failing):
        trainer.advance(2, controller)
    result: dict[str, Any] = {
        "history": list(controller.history),
        "warnings": trainer.warnings[warned:],
        "plans": sorted(p.name for p in (folder / "run").glob("plans/*")),
    }
    place = folder / "checkpoints"
    config = trainer.config.model_copy(update={"save": place})
    trainer.state = replace(trainer.state, config=config)
    before = _whole(trainer)
    with _full_disk([(checkpoint, "finish_checkpoint")]):
        try:
            _save(trainer, controller)
        except RemoteFailure as failure:
            result["failed"] = str(failure)
    # A refresh, a solve and a checkpoint succeed as if nothing had been.
    result["same"] = _whole(trainer) == before
    trainer.advance(2, controller)
    result["read before"] = latest_iteration(place)
    _save(trainer, controller)
    result["read after"] = latest_iteration(place)
    result["last history"] = list(controller.history)
    return result


def _whole(trainer: Trainer) -> dict[str, Any]:
    """Digests once all parameters are gathered, as a checkpoint wants them."""
    with trainer.state.gathered():
        return trainer.digests()


def _save(trainer: Trainer, controller: Any) -> None:
    progress = Progress(trainer.step, snip=controller.state(trainer.step))
    save_checkpoint(trainer.state, controller._control, progress)


@contextmanager
def _full_disk(writers: list[tuple[Any, str]]) -> Iterator[None]:
    """Let rank 0 find the disk full whenever one of these functions writes."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with ExitStack() as stack:
        for owner, name in writers if dist.get_rank() == 0 else ():
            stack.enter_context(mock.patch.object(owner, name, side_effect=full))
        yield
