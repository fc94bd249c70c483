"""The solver process, with the real worker and with workers that fail in every way."""

import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_snip.errors import InfeasiblePlanError, PlanningError, UsageError
from megatron_snip.log import forget_warnings
from megatron_snip.planning import solver_process
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import SolverProcess, spare_threads
from tests.unit.planning.build import plan_of, problem_of

PROBLEM = problem_of([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]], target=0.3)
LONG_S = 200.0


def faulty(body: str) -> list[str]:
    """A worker that reads a line and then does something else than answer."""
    head = "import os, signal, sys, time\nline = sys.stdin.readline()\n"
    return [sys.executable, "-c", head + textwrap.dedent(body)]


def processes_gone(solver: SolverProcess) -> bool:
    return solver._child._process is None


def test_plans_are_those_of_make_plan_and_the_child_stays() -> None:
    with SolverProcess() as solver:
        for step in (3, 4):
            previous = plan_of(["fp8", "fp8", "fp4"])
            solver.submit(PROBLEM, PlanSettings(max_changes=2), previous, step)
            plan = solver.result(LONG_S)
            wanted = make_plan(PROBLEM, PlanSettings(max_changes=2), previous, step)
            assert plan.digest == wanted.digest
            assert (plan.step, plan.objective, plan.bound) == (step, wanted.objective, wanted.bound)
            child = solver._child._process
            assert child is not None
            if step == 3:
                pid = child.pid
        assert child.pid == pid
    assert child.poll() is not None


def test_ready_never_blocks_and_tells_when_a_result_is_there() -> None:
    with SolverProcess() as solver:
        assert not solver.ready()
        solver.submit(PROBLEM, PlanSettings())
        deadline = time.monotonic() + LONG_S
        while not solver.ready() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert solver.ready()
        solver.result(0.0)
        assert not solver.ready()


def test_infeasible_and_usage_errors_arrive_as_such_and_the_child_stays() -> None:
    with SolverProcess() as solver:
        solver.submit(PROBLEM, PlanSettings(target=0.9, pins=(("*.layers.1.*", "fp8"),)))
        with pytest.raises(InfeasiblePlanError) as caught:
            solver.result(LONG_S)
        assert caught.value.conflicts == ("target 0.9", "pin *.layers.1.*=fp8")
        assert caught.value.best_target == pytest.approx(2 / 3)
        child = solver._child._process
        solver.submit(PROBLEM, PlanSettings(policy="min-abs-err"))
        with pytest.raises(UsageError, match="--statistics"):
            solver.result(LONG_S)
        metrics = {name: {"fp4": {"abs_error": 1.0}} for name in PROBLEM.names}
        solver.submit(PROBLEM, PlanSettings(policy="min-abs-err"), metrics=metrics)
        assert solver.result(LONG_S).policy == "min-abs-err"
        assert solver._child._process is child


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (faulty("sys.exit(3)"), "status 3"),
        (faulty("os.kill(os.getpid(), signal.SIGKILL)"), "status -9"),
        (faulty("print('{\"id\": 1, ')"), "garbage"),
        (faulty('print(\'{"id": 99, "plan": {}}\')'), "request 99"),
        (faulty("sys.stdout.write('half a line')"), "without an answer"),
        ([sys.executable, "-c", "pass"], "without an answer"),
        (["/nonexistent/worker"], "cannot be started"),
    ],
)
def test_failures_are_planning_errors_and_the_next_submit_starts_afresh(
    command: list[str], word: str
) -> None:
    with SolverProcess(command) as solver:
        for _ in range(2):
            solver.submit(PROBLEM, PlanSettings())
            with pytest.raises(PlanningError, match=word):
                solver.result(LONG_S)


def test_a_hung_child_is_ended_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with SolverProcess(faulty("time.sleep(600)")) as solver:
        solver.submit(PROBLEM, PlanSettings())
        hung = solver._child.start()
        with pytest.raises(PlanningError, match="did not answer within"):
            solver.result(0.2)
        assert hung.poll() is not None
        assert processes_gone(solver)
        monkeypatch.setattr(solver._child, "_command", solver_process.worker_command())
        solver.submit(PROBLEM, PlanSettings())
        assert solver.result(LONG_S).status == "optimal"


def test_submitting_does_not_wait_for_a_child_that_does_not_read() -> None:
    # A request far larger than a pipe's buffer, to a child that never reads.
    large = problem_of([[0.0, 1.0]] * 5000)
    with SolverProcess(["sleep", "600"]) as solver:
        done = threading.Event()

        def submit() -> None:
            solver.submit(large, PlanSettings())
            done.set()

        threading.Thread(target=submit, daemon=True).start()
        assert done.wait(LONG_S)
        assert not solver.ready()
        with pytest.raises(PlanningError, match="did not answer"):
            solver.result(0.1)


def test_a_child_that_prints_is_not_mistaken_for_an_answer(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "import megatron_snip.planning.worker as worker\n"
        "make_plan = worker.make_plan\n"
        "def chatty(*arguments):\n"
        "    print('solver chatter')\n"
        "    return make_plan(*arguments)\n"
        "worker.make_plan = chatty\n"
        "sys.exit(worker.main([]))\n"
    )
    with SolverProcess([sys.executable, "-c", program]) as solver:
        solver.submit(PROBLEM, PlanSettings())
        assert solver.result(LONG_S).status == "optimal"


def test_the_working_directory_cannot_shadow_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "types.py", "megatron_snip.py"):
        (tmp_path / name).write_text("raise ImportError('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    with SolverProcess() as solver:
        solver.submit(PROBLEM, PlanSettings())
        assert solver.result(LONG_S).status == "optimal"


def misuse(act: Callable[[SolverProcess], object], word: str) -> None:
    with SolverProcess(["sleep", "600"]) as solver, pytest.raises(PlanningError, match=word):
        act(solver)


def test_misuse_is_refused() -> None:
    misuse(lambda solver: solver.result(0.1), "no plan was submitted")

    def twice(solver: SolverProcess) -> None:
        solver.submit(PROBLEM, PlanSettings(), step=8)
        solver.submit(PROBLEM, PlanSettings())

    misuse(twice, "plan of step 8 is still being made")

    def closed(solver: SolverProcess) -> None:
        solver.close()
        solver.close()
        solver.submit(PROBLEM, PlanSettings())

    misuse(closed, "closed")


def test_a_result_nobody_took_is_dropped() -> None:
    with SolverProcess() as solver:
        solver.submit(PROBLEM, PlanSettings(), step=1)
        assert solver._job is not None
        assert solver._job.done.wait(LONG_S)
        solver.submit(PROBLEM, PlanSettings(), step=2)
        assert solver.result(LONG_S).step == 2


def test_the_solver_leaves_a_core_to_every_training_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(solver_process.os, "sched_getaffinity", lambda _: set(range(8)))
    assert spare_threads(2) == 6
    assert spare_threads(100) == 1
    forget_warnings()
    with SolverProcess(["sleep", "600"], local_processes=5) as solver:
        solver.submit(PROBLEM, PlanSettings(workers=16))
        assert solver._job is not None
        assert solver._job.request.settings.workers == 3
    assert "limited to 3" in caplog.text
