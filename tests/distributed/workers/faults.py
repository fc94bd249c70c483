"""What test_faults.py runs on ranks: refreshes that fail at every phase, and plans that break."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_snip.collectives import RemoteFailure
from megatron_snip.cycle import refresher
from megatron_snip.linears import gemms, passes
from megatron_snip.linears.model import PlannedModel
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.reporting import run_directory
from megatron_snip.reporting.reporter import FileReporter, Reporters
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.statistics import probe, recorder, reduce, refresh, sensitivity
from megatron_snip.trainer.checkpoint import Checkpoints, Progress
from megatron_snip.trainer.checkpoint_folder import CheckpointFolder
from megatron_snip.types import Gemm, Operand
from tests.distributed.workers import small_model
from tests.distributed.workers.controller import MODEL, FakeSolver
from tests.distributed.workers.small_model import SyntheticTokens, Trainer, layout

SNIP: dict[str, Any] = {
    "interval": 2,
    "start_step": 0,
    "lag": 1,
    "probe_rows": 8,
    "efficiency_target": 0.5,
}
"""Refreshes at even steps; their outcomes are due before the odd ones."""

Fail = Callable[[], None]


def patience_s() -> float:
    """How long ranks wait for each other in a refresh: well above what one takes on two cores."""
    return 2.0 * dist.get_world_size()


def bug() -> None:
    raise RuntimeError("a bug")


def no_memory() -> None:
    raise torch.OutOfMemoryError("tried to allocate 1.00 EiB")


def sleep() -> None:
    """Come too late for the others' patience."""
    time.sleep(patience_s() + 1.0)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


PLACES: dict[str, tuple[Any, str, Fail]] = {
    "prepare": (refresher, "MeasuringPasses", bug),
    "moments": (sensitivity, "_own_part", bug),
    "moments memory": (sensitivity, "_own_part", no_memory),
    "pass A": (recorder, "format_errors", bug),
    "pass A memory": (recorder, "format_errors", no_memory),
    "perturb": (refresh, "perturb", bug),
    "pass B": (probe.Comparer, "_compare", bug),
    "reduce": (reduce, "_local_table", bug),
    "late": (reduce, "_local_table", sleep),
    "divergences": (refresher, "divergence_table", bug),
    "NaN": (reduce, "_local_table", bug),
    "solve": (SolverProcess, "result", bug),
    "broadcast": (PrecisionPlan, "from_dict", bug),
    "apply": (PlannedModel, "apply", bug),
}
"""Where each fault strikes, on the last rank; the solver is on rank 0. NaN goes into the table."""

A_PHASE_EACH = ("prepare", "pass A", "pass B", "reduce", "NaN", "solve", "broadcast", "apply")
"""One fault a phase, where many layouts are to be tried."""

REFRESHED = ("NaN", "solve", "broadcast", "apply")
"""Faults of refreshes that have measured."""

WITHOUT_PEERS: dict[str, tuple[Any, str, Fail]] = {
    "model": (passes, "_losses", bug),
    "model memory": (passes, "_losses", no_memory),
}
"""Within a measuring pass but outside of what observers do; only data-parallel ranks survive it."""


class Faults:
    """Strikes at `now`, on the last rank; every other call passes through."""

    def __init__(self, places: dict[str, tuple[Any, str, Fail]]) -> None:
        self.now = ""
        self.once = False
        self._places = places
        self._struck = 0

    def at(self, fault: str, once: bool = False) -> None:
        """Be ready for `fault`, at its first call alone or at every one."""
        self.now, self.once, self._struck = fault, once, 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        kept = [(owner, name, owner.__dict__[name]) for owner, name, _ in self._places.values()]
        for fault, (owner, name, fail) in self._places.items():
            before = owner.__dict__[name]
            setattr(owner, name, self._striking(fault, before, fail))
        try:
            yield
        finally:
            for owner, name, original in kept:
                setattr(owner, name, original)

    def _striking(self, fault: str, before: Any, fail: Fail) -> Any:
        method = isinstance(before, classmethod)
        call = before.__func__ if method else before

        def maybe(*args: Any, **kwargs: Any) -> Any:
            here = dist.get_rank() == (0 if fault == "solve" else dist.get_world_size() - 1)
            if self.now == fault and here and not (self.once and self._struck):
                self._struck += 1
                if fault == "NaN":
                    return call(*args, **kwargs).mul_(math.nan)
                if fault == "apply":
                    call(*args, **kwargs)  # half the work is done
                fail()
            return call(*args, **kwargs)

        return classmethod(maybe) if method else maybe


def every_phase(
    layouts: dict[str, dict[str, Any]], folder: str, only: list[str] | None = None
) -> dict[str, Any]:
    """For each layout: one run with a fault in every refresh, and the run without SNIP.

    Args:
        layouts: settings by name.
        folder: for the files of runs.
        only: faults to try; all by default.
    """
    return {
        name: _faulty_run(values, Path(folder) / name, only) for name, values in layouts.items()
    }


def _faulty_run(values: dict[str, Any], folder: Path, only: list[str] | None) -> dict[str, Any]:
    peerless = not any(key.endswith("parallel_size") for key in values)
    places = {**PLACES, **(WITHOUT_PEERS if peerless else {})}
    faults = Faults(places)
    outcomes: dict[str, Any] = {}
    with layout({**MODEL, **values}) as trainer, faults.installed():
        controller = trainer.controller({**SNIP, "timeout": patience_s()})
        initial = controller.plan.digest
        for fault in only or places:
            _strike(trainer, controller, faults, fault, outcomes)
            if only is None and fault not in REFRESHED:
                # Measuring works again, up to the very last of the cycle.
                _strike(trainer, controller, faults, "apply", outcomes, f"after {fault}")
        result = {**trainer.digests(), "kept": controller.plan.digest == initial}
        steps = trainer.step
        faults.at("pass A memory", once=True)
        trainer.advance(2, controller)
        healed = {
            "history": list(controller.history),
            "digest": controller.plan.digest,
            "refreshed": trainer.reporter.refreshes[-1].step,
        }
        saved = _saving(trainer, controller, folder)
        controller.close()
    with layout({**MODEL, **values}) as trainer:
        trainer.advance(steps, trainer.plain())
        plain = trainer.digests()
    told = {"outcomes": outcomes, "healed": healed, "steps": steps, "saved": saved}
    return {**told, "run": result, "plain": plain}


def _saving(trainer: Trainer, controller: Any, folder: Path) -> dict[str, Any]:
    """Full disks: under the run's files for a cycle, then under a checkpoint; then none is full."""
    failing = [(run_directory, "write_plan"), (run_directory, "write_atomic")]
    if dist.get_rank() == 0:
        files = FileReporter(RunDirectory(folder / "run"))
        controller._announcer.reporter = Reporters([files, trainer.reporter])
    warned = len(trainer.warnings)
    with _full_disk(failing):
        trainer.advance(2, controller)
    result: dict[str, Any] = {
        "history": list(controller.history),
        "warnings": trainer.warnings[warned:],
        "plans": sorted(p.name for p in (folder / "run").glob("plans/*")),
    }
    place = folder / "checkpoints"
    trainer.config = trainer.config.model_copy(update={"save": place})
    checkpoints = Checkpoints(trainer.config, trainer.state, controller._control)
    before = _whole(trainer)
    with _full_disk([(CheckpointFolder, "finish")]):
        try:
            _save(trainer, controller, checkpoints)
        except RemoteFailure as failure:
            result["failed"] = str(failure)
    # A refresh, a solve and a checkpoint succeed as if nothing had been.
    result["same"] = _whole(trainer) == before
    trainer.advance(2, controller)
    result["read before"] = CheckpointFolder(place).latest()
    _save(trainer, controller, checkpoints)
    result["read after"] = CheckpointFolder(place).latest()
    result["last history"] = list(controller.history)
    return result


def _whole(trainer: Trainer) -> dict[str, Any]:
    """Digests once all parameters are gathered, as a checkpoint wants them."""
    with trainer.state.runner.gathered():
        return trainer.digests()


def _save(trainer: Trainer, controller: Any, checkpoints: Checkpoints) -> None:
    checkpoints.save(Progress(trainer.step, snip=controller.state(trainer.step)))


@contextmanager
def _full_disk(writers: list[tuple[Any, str]]) -> Iterator[None]:
    """Let rank 0 find the disk full whenever one of these functions writes."""

    def fail(*_: Any, **__: Any) -> None:
        disk_full()

    kept = [(owner, name, getattr(owner, name)) for owner, name in writers]
    for owner, name in writers:
        if dist.get_rank() == 0:
            setattr(owner, name, fail)
    try:
        yield
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)


def _strike(
    trainer: Trainer, controller: Any, faults: Faults, fault: str, outcomes: Any, label: str = ""
) -> None:
    """One cycle of two steps with a fault in it."""
    warned, told = len(trainer.warnings), len(trainer.reporter.events)
    refreshed, begin = len(trainer.reporter.refreshes), time.monotonic()
    faults.at(fault, once=fault == "apply")
    trainer.advance(2, controller)
    faults.at("")
    outcomes[label or fault] = {
        "warnings": trainer.warnings[warned:],
        "events": [event.kind for event in trainer.reporter.events[told:]],
        "measured": len(trainer.reporter.refreshes) - refreshed,
        "history": list(controller.history),
        "seconds": time.monotonic() - begin,
    }


# ---- the loss guard ---------------------------------------------------------------------------

START = 15
GUARDED: dict[str, Any] = {
    "interval": 200,
    "start_step": START,
    "lag": 1,
    "probe_rows": 8,
    "efficiency_target": 0.5,
}
"""One refresh, when the model has learned something; its plan comes before the step after."""


class Cycles(SyntheticTokens):
    """Tokens that count to 8 again and again, but for one in thirty: learned within 15 steps."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(7919 * index + 1)
        sample = super().__getitem__(index)
        count = self._length + 1
        tokens = (int(torch.randint(8, (), generator=generator)) + torch.arange(count)) % 8
        odd = torch.rand(count, generator=generator) < 0.03
        tokens = tokens.where(~odd, torch.randint(0, 256, (count,), generator=generator))
        return {**sample, "tokens": tokens[:-1], "labels": tokens[1:]}


@contextmanager
def learnable(values: dict[str, Any]) -> Iterator[Trainer]:
    """The small model on `Cycles`."""
    small_model.SyntheticTokens = Cycles  # type: ignore[misc]
    batch = {"seq_length": 64, "global_batch_size": 8, "lr": 5e-3}
    try:
        with layout({**MODEL, **batch, **values}) as trainer:
            yield trainer
    finally:
        small_model.SyntheticTokens = SyntheticTokens  # type: ignore[misc]


def _nan_gradient(tensor: torch.Tensor, operand: Operand, gemm: Gemm) -> torch.Tensor:
    return torch.full_like(tensor, math.nan) if operand is Operand.GRAD_OUTPUT else tensor


def _nan_loss(tensor: torch.Tensor, operand: Operand, gemm: Gemm) -> torch.Tensor:
    return torch.full_like(tensor, math.inf) if operand is Operand.INPUT else tensor


def _useless(tensor: torch.Tensor, operand: Operand, gemm: Gemm) -> torch.Tensor:
    return tensor * -30.0 if operand is Operand.WEIGHT else tensor


def _poison(tensor: torch.Tensor, operand: Operand, gemm: Gemm) -> torch.Tensor:
    """The forward is right and every weight learns the contrary."""
    backwards = gemm is Gemm.WGRAD and operand is Operand.GRAD_OUTPUT
    return -tensor if backwards else tensor


BREAKS = {"gradient": _nan_gradient, "loss": _nan_loss, "useless": _useless, "poison": _poison}


@contextmanager
def breaking(how: str) -> Iterator[None]:
    """Let fp4 be a format that breaks training."""
    original = gemms._operand

    def broken(tensor: Any, name: str, operand: Any, gemm: Any, *rest: Any) -> torch.Tensor:
        seen = original(tensor, name, operand, gemm, *rest)
        return BREAKS[how](seen, operand, gemm) if name == "fp4" else seen

    gemms._operand = broken
    try:
        yield
    finally:
        gemms._operand = original


def all_fp4(problem: Any, settings: Any, *rest: Any) -> PrecisionPlan:
    """Put every linear into fp4."""
    return make_plan(problem, settings.model_copy(update={"policy": "uniform-fp4"}), *rest)


def bad_plans(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """For each layout: plans that break a step, and the run that never had one."""
    results = {}
    for name, values in layouts.items():
        runs = {how: _bad_plan(values, how, START + 4) for how in ("gradient", "loss", "useless")}
        with learnable(values) as trainer:
            trainer.advance(START + 4, trainer.plain())
            runs["plain"] = trainer.digests()
        results[name] = runs
    return results


def _bad_plan(values: dict[str, Any], how: str, steps: int) -> dict[str, Any]:
    solver: Any = FakeSolver(all_fp4) if dist.get_rank() == 0 else None
    with learnable(values) as trainer, breaking(how):
        # No second refresh: the run then is one that never had a plan.
        controller = trainer.controller({**GUARDED, "stop_step": START + 1}, solver)
        trainer.advance(steps, controller)
        controller.close()
        return {
            **trainer.digests(),
            "history": controller.history,
            "digest": controller.plan.digest,
            "bf16": sorted({str(option) for option in controller.plan.linears.values()}),
            "events": [(e.step, e.kind) for e in trainer.reporter.events],
            "warnings": trainer.warnings,
            "planned": [(a.step, a.plan.step, a.num_changed) for a in trainer.reporter.applied],
        }


def poisoned(values: dict[str, Any], steps: int) -> dict[str, Any]:
    """A plan that spoils the weights little by little; the run goes on, and one without it."""
    snip = {**GUARDED, "guard_patience": 3, "stop_step": START + 1}
    solver: Any = FakeSolver(all_fp4) if dist.get_rank() == 0 else None
    with learnable(values) as trainer, breaking("poison"):
        controller = trainer.controller(snip, solver)
        trainer.advance(steps, controller)
        controller.close()
        result = {
            "losses": trainer.losses,
            "events": [(e.step, e.kind, e.message) for e in trainer.reporter.events],
            "digest": controller.plan.digest,
        }
    with learnable(values) as trainer:
        trainer.advance(steps, trainer.plain())
    return {**result, "plain": trainer.losses}


def asked_again(values: dict[str, Any]) -> dict[str, Any]:
    """After a plan has gone, the next step measures; the same plan is not taken twice."""
    solver: Any = FakeSolver(all_fp4) if dist.get_rank() == 0 else None
    with learnable(values) as trainer, breaking("useless"):
        controller = trainer.controller(GUARDED, solver)
        trainer.advance(START + 4, controller)
        state = controller.state(START + 4).to_dict()
        controller.close()
        return {
            "refreshes": [r.step for r in trainer.reporter.refreshes],
            "events": [(e.step, e.kind) for e in trainer.reporter.events],
            "messages": [e.message for e in trainer.reporter.events],
            "state": state["guard"],
            "history": controller.history,
        }
