"""`make soak`: a long run with faults in every other refresh, on two ranks.

    python -m tests.nightly.soak [--steps 2000] [--seed 0] [--output FILE]

A refresh every ten steps; at random it fails on the last rank, wherever a refresh can fail (see
tests/distributed/workers/fault_places.py), or the solver dies, or its plan breaks the loss. After
every cycle the ranks compare what they run. Printed and written: how often each thing happened and
what became of it, whether ranks ever differed, and how much memory a rank held at the beginning and
at the end: of the host, and of the device (what its allocator has given out; on a machine without
one, the bytes of all tensors alive, which would lie there).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.refresh import tensor_bytes
from megatron_snip import guard, pending_solve
from megatron_snip.collectives import gather_json
from megatron_snip.files import write_atomic
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assigned_plan, assignment_digest
from megatron_snip.planning.solver_process import SolverProcess
from tests.distributed.launch import run_ranks
from tests.distributed.workers.broken_format import broken_format
from tests.distributed.workers.controller import MODEL
from tests.distributed.workers.fault_places import PLACES, Faults
from tests.distributed.workers.small_model import Trainer, layout

INTERVAL = 10
SNIP: dict[str, Any] = {
    "interval": INTERVAL,
    "start_step": 5,
    "lag": 3,
    "efficiency_target": 0.5,
}
SOLVER_FAULTS = ("solver killed", "solver error", "bad plan")
SHARE = 0.5
"""Share of the cycles with a fault."""
TIMEOUT_S = 20_000.0


class Solver:
    """The real solver process, with faults of its own."""

    def __init__(self) -> None:
        self.now = ""
        self._process = SolverProcess()
        self._problem: Any = None

    def submit(self, problem: Any, *rest: Any) -> None:
        self._problem = problem
        self._process.submit(problem, *rest)
        if self.now == "solver killed":
            self._process._child.kill()

    def result(self, timeout_s: float) -> PrecisionPlan:
        plan = self._process.result(timeout_s)
        if self.now == "solver error":
            raise ZeroDivisionError("a bug")
        return self._bad(plan) if self.now == "bad plan" else plan

    def close(self) -> None:
        self._process.close()

    def _bad(self, plan: PrecisionPlan) -> PrecisionPlan:
        """Put all linears but one into a format that breaks; another one each time."""
        linears = dict.fromkeys(plan.linears, Option.uniform("fp3"))
        linears[random.Random(plan.iteration).choice(list(linears))] = Option.uniform("fp8")
        work = {row.name: (row.stage, row.flops) for row in self._problem.linears}
        return assigned_plan(linears, work, "fp4", "bad", plan.iteration)


def rank(steps: int, seed: int) -> dict[str, Any]:
    """One rank of the soak."""
    dice = random.Random(seed)
    faults = Faults(PLACES)
    guard.WATCHED_ITERATIONS = 3  # so that a bad plan is reverted before the next refresh
    pending_solve.SOLVER_GRACE_S = -27.5  # of the solver's own 30 s
    # held for the rest of the process
    broken = broken_format("fp3", lambda tensor, *_: torch.full_like(tensor, math.nan))
    broken.__enter__()
    outcomes: Counter[str] = Counter()
    differences: list[int] = []
    memory: list[float] = []
    device: list[int] = []
    with layout({**MODEL, "train_iters": steps}) as trainer, faults.installed():
        import torch.distributed as dist

        solver: Any = Solver() if dist.get_rank() == 0 else None
        controller = trainer.controller(SNIP, solver)
        group = controller._control
        trainer.advance(SNIP["start_step"] - 1, controller)  # a cycle begins with a refresh
        begin = time.monotonic()
        while trainer.step < steps:
            fault = dice.choice((*PLACES, *SOLVER_FAULTS)) if dice.random() < SHARE else ""
            faults.at(fault, once=fault == "apply")
            if solver is not None:
                solver.now = fault
            noticed = len(trainer.events.notices)
            applied = len(controller.history)
            trainer.advance(min(INTERVAL, steps - trainer.step), controller)
            kinds = sorted({notice.kind for _, notice in trainer.events.notices[noticed:]})
            became = "+".join(kinds) or "plan"
            outcomes[f"{fault or 'no fault'}: {became}"] += 1
            assert fault or len(controller.history) > applied or "refresh_failed" in kinds
            mine = _running(trainer, controller)
            if len({json.dumps(each) for each in gather_json(mine, group)}) != 1:
                differences.append(trainer.step)
            memory.append(_resident_mib())
            _forget(trainer)
            device.append(_device_bytes())
        controller.close()
    early = slice(len(memory) // 5, len(memory) // 5 + 5)
    return {
        "steps": trainer.step,
        "refreshes": len(memory),
        "outcomes": dict(sorted(outcomes.items())),
        "plans_applied": len(controller.history),
        "ranks_differed_at": differences,
        "losses_finite": all(math.isfinite(loss) for loss in trainer.losses),
        "last_loss": sum(trainer.losses[-50:]) / 50,
        "seconds": time.monotonic() - begin,
        "memory_mib": {"a fifth in": max(memory[early]), "last": max(memory[-5:])},
        "device_bytes": {"a fifth in": max(device[early]), "last": max(device[-5:])},
    }


def _running(trainer: Trainer, controller: Any) -> list[Any]:
    """What must be the same on all ranks: plan, history, loss; and what linears really run."""
    mine = {p.name: p.option for p in controller.model.linears}
    assert all(controller.plan.linears[name] == option for name, option in mine.items())
    digest = assignment_digest(controller.plan.linears)
    return [digest, controller.plan.digest, list(controller.history), trainer.losses[-1].hex()]


def _forget(trainer: Trainer) -> None:
    """What the test's own writer keeps is not the product's memory."""
    events = trainer.events
    for kept in (events.measured, events.applied, events.metrics, events.notices):
        kept.clear()
    trainer.warnings.clear()


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 2**20, 1)


def _device_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else tensor_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    arguments = {"steps": args.steps, "seed": args.seed}
    ranks = run_ranks(2, "tests.nightly.soak:rank", arguments, timeout_s=TIMEOUT_S)
    leader = ranks[0]
    growth = [r["memory_mib"]["last"] / r["memory_mib"]["a fifth in"] - 1.0 for r in ranks]
    result = {
        "version": 1,
        "machine": f"{platform.machine()}, gloo, 2 ranks",
        "torch": torch.__version__,
        "seed": args.seed,
        **leader,
        "memory_growth": [round(g, 4) for g in growth],
        "memory_mib": [r["memory_mib"] for r in ranks],
        "device_bytes": [r["device_bytes"] for r in ranks],
    }
    print(json.dumps(result, indent=1))
    good = (
        all(r["losses_finite"] and not r["ranks_differed_at"] for r in ranks)
        and all(r["outcomes"] == leader["outcomes"] for r in ranks)
        and all(g < 0.05 for g in growth)
        and all(r["device_bytes"]["last"] <= r["device_bytes"]["a fifth in"] for r in ranks)
    )
    print("soak: good" if good else "soak: BAD")
    if args.output is not None:
        write_atomic(args.output, json.dumps(result, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
