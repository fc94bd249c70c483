"""Does training wait for the solver? Step times with and without a solve in flight.

    python -m benchmarks.stall [--steps 240] [--output benchmarks/results/stall.json]

The embedded trainer trains the demo's Llama on one rank with one thread. Its steps come in blocks,
in turn under three conditions:

    idle       nothing else happens
    process    plans are made all the time as training makes them: in SolverProcess. Each step asks
               `ready`; when a plan is there its `result` is taken and the next problem submitted.
    thread     the same in a thread of the training process, which is what SolverProcess avoids

Each plan is for a mixture of experts with 4,224 linears, hundreds of times the model's own, so that
a solve (and passing its problem on) lasts many steps. A step's time is from one
`forward_backward` to the next, so it holds all that the training thread does for the solver. Needs
a core beside the trainer's; on a busy machine compare the conditions, not the numbers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported


from benchmarks.machine import write_result
from benchmarks.solver import experts_model
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import SolverProcess
from megatron_snip.reporting.events import Writer
from megatron_snip.run.step import ForwardBackward
from megatron_snip.trainer import session
from megatron_snip.trainer.config import make_train_config
from megatron_snip.trainer.loop import PlainTraining

Condition = Literal["idle", "process", "thread"]
CONDITIONS: tuple[Condition, ...] = ("idle", "process", "thread")
BLOCK = 10
"""Steps under one condition before the next one's turn."""

WARM_UP = 10
SETTINGS = PlanSettings(pipeline_balance="stage")
GIVE_UP_S = 300.0


class StallHook(PlainTraining):
    """Keeps plans in the making and writes down how long steps take."""

    def __init__(self, writers: Sequence[Writer], problem: PlanningProblem) -> None:
        super().__init__(writers)
        self._problem = problem
        self._solver = SolverProcess()
        self._in_flight = False
        self._thread: threading.Thread | None = None
        self._begun: tuple[Condition, float] | None = None
        self.seconds: dict[Condition, list[float]] = {name: [] for name in CONDITIONS}
        self.calls: dict[str, list[float]] = {"submit": [], "ready": [], "result": []}
        self.plans = dict.fromkeys(CONDITIONS, 0)

    def forward_backward(
        self, iteration: int, function: ForwardBackward, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """End the iteration before, begin this one, and keep its condition's solver busy."""
        self._begin(iteration - 1)
        return super().forward_backward(iteration, function, **kwargs)

    def _begin(self, step: int) -> None:
        now = time.perf_counter()
        if self._begun is not None:
            self.seconds[self._begun[0]].append(now - self._begun[1])
        condition = CONDITIONS[step // BLOCK % len(CONDITIONS)]
        if step % BLOCK == 0:
            self._drain()
            now = time.perf_counter()
        self._begun = (condition, now) if step >= WARM_UP else None
        if condition == "process":
            self._keep_process_busy()
        elif condition == "thread":
            self._keep_thread_busy()

    def close(self) -> None:
        """End the solver."""
        self._drain()
        self._solver.close()
        super().close()

    def _keep_process_busy(self) -> None:
        if self._in_flight:
            begin = time.perf_counter()
            ready = self._solver.ready()
            self.calls["ready"].append(time.perf_counter() - begin)
            if not ready:
                return
            begin = time.perf_counter()
            self._solver.result(GIVE_UP_S)
            self.calls["result"].append(time.perf_counter() - begin)
            self.plans["process"] += 1
        begin = time.perf_counter()
        self._solver.submit(self._problem, SETTINGS)
        self.calls["submit"].append(time.perf_counter() - begin)
        self._in_flight = True

    def _keep_thread_busy(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self.plans["thread"] += self._thread is not None
        self._thread = threading.Thread(target=make_plan, args=(self._problem, SETTINGS))
        self._thread.start()

    def _drain(self) -> None:
        """Wait for what is in flight, so that it does not reach into the next block."""
        if self._in_flight:
            self._solver.result(GIVE_UP_S)
            self.plans["process"] += 1
            self._in_flight = False
        if self._thread is not None:
            self._thread.join()
            self.plans["thread"] += 1
            self._thread = None


def measure(steps: int) -> StallHook:
    """Train on one rank; return the hook with what it has measured."""
    values: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_attention_heads": 4,
        "seq_length": 128,
        "micro_batch_size": 4,
        "global_batch_size": 4,
        "train_iters": steps + 1,  # a step's time ends where the next one begins
        "eval_interval": 10 * steps,
        "eval_iters": 0,
    }
    problem = experts_model(32, 132, 8, seed=0)
    hooks: list[StallHook] = []

    def make_hook(state: object, writers: list[Writer], start: object) -> StallHook:
        hooks.append(StallHook(writers, problem))
        return hooks[0]

    session.make_hook = make_hook
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        session.run_rank(make_train_config(values | {"run_dir": str(Path(folder) / "run")}))
    return hooks[0]


def summary(hook: StallHook) -> dict[str, Any]:
    """Return percentiles in milliseconds and ratios to the idle condition."""
    rows = {}
    for condition, seconds in hook.seconds.items():
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        rows[condition] = {
            "steps": len(seconds),
            "plans": hook.plans[condition],
            **{f"p{k}_ms": 1e3 * cuts[k - 1] for k in (10, 50, 90, 99)},
            "max_ms": 1e3 * max(seconds),
            "median_ratio_to_idle": statistics.median(seconds)
            / statistics.median(hook.seconds["idle"]),
        }
    calls = {name: 1e3 * max(times, default=0.0) for name, times in hook.calls.items()}
    return {"step_ms": rows, "longest_call_ms": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--output", type=Path, metavar="FILE")
    args = parser.parse_args()
    result = summary(measure(args.steps))
    print(
        f"{'condition':10}{'steps':>6}{'plans':>6}{'p10':>9}{'p50':>9}{'p90':>9}{'p99':>9}  ratio"
    )
    for condition, row in result["step_ms"].items():
        cuts = "".join(f"{row[f'p{k}_ms']:9.1f}" for k in (10, 50, 90, 99))
        ratio = row["median_ratio_to_idle"]
        print(f"{condition:10}{row['steps']:6d}{row['plans']:6d}{cuts}  {ratio:.3f}")
    calls = ", ".join(f"{name} {ms:.2f} ms" for name, ms in result["longest_call_ms"].items())
    print(f"longest call on the training thread: {calls}")
    if args.output is not None:
        write_result(args.output, result)


if __name__ == "__main__":
    main()
