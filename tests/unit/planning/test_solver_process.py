"""The solver process, with the real worker and with workers that fail in every way."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_snip import plugins
from megatron_snip.collectives import Control
from megatron_snip.errors import InfeasiblePlanError, PlanningError, UsageError
from megatron_snip.planning import policies, solver_process
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import (
    NICENESS,
    OOM_SCORE,
    PlanRequest,
    SolverProcess,
    worker_command,
)
from megatron_snip.plugins import load_plugins
from megatron_snip.run.solve import PendingProblem, Solver
from tests.unit.planning.build import options_of, plan_of, problem_of

PROBLEM = problem_of([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]], target=0.3)
UNUSUAL = problem_of(
    [[0.1, None], [1 / 3, 2e-300], [0.2, 0.3]], 0.3, seconds=[[1.0, 0.1], [2.0, 0.3], [1.0, 0.7]]
)
WRONG = plan_of(["fp8"] * 3).to_dict()
LONG_S = 200.0


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def child_since(before: set[psutil.Process]) -> psutil.Process:
    """The only process that this one has started since."""
    (child,) = children() - before
    return child


def faulty(body: str) -> list[str]:
    """A worker that reads a line and then does something else than answer."""
    head = "import os, signal, sys, time\nline = sys.stdin.readline()\n"
    return [sys.executable, "-c", head + textwrap.dedent(body)]


def answering(reply: object) -> list[str]:
    text = json.dumps(reply)
    return faulty(f"while line:\n    print({text!r}, flush=True)\n    line = sys.stdin.readline()")


def test_plans_are_those_of_make_plan_and_the_child_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "types.py", "megatron_snip.py"):  # must not shadow the real ones
        (tmp_path / name).write_text("raise ImportError('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    settings, previous = PlanSettings(change_penalty=0.5), plan_of(["fp8", "fp8", "fp4"])
    timed = PlanSettings(cost="time", pins=(("*.layers.2.*", "fp8"),), seed=3, target=0.1)
    before = children()
    with closing(SolverProcess()) as solver:
        child = child_since(before)
        for request in ((PROBLEM, settings, previous, 3), (UNUSUAL, timed, previous, 4)):
            solver.submit(*request)
            plan, wanted = solver.result(LONG_S), make_plan(*request)
            assert plan.model_copy(update={"seconds": wanted.seconds}) == wanted
        assert child_since(before) == child
        niceness = os.getpriority(os.PRIO_PROCESS, child.pid)
        assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        if sys.platform == "linux":
            assert int(Path(f"/proc/{child.pid}/oom_score_adj").read_text()) == OOM_SCORE
        os.kill(child.pid, signal.SIGINT)  # Ctrl-C is the trainer's
        solver.submit(PROBLEM, settings, iteration=1)
        [exchange] = [each for each in threading.enumerate() if each.name == "snip-solver"]
        exchange.join(LONG_S)
        solver.submit(PROBLEM, settings)  # drops the plan that is ready
        assert solver.result(LONG_S).iteration == 0
        assert child_since(before) == child
    assert not child.is_running()


def test_errors_keep_their_type_and_the_child_stays() -> None:
    before = children()
    with closing(SolverProcess()) as solver:
        child = child_since(before)
        solver.submit(PROBLEM, PlanSettings(target=0.9, pins=(("*.layers.1.*", "fp8"),)))
        with pytest.raises(InfeasiblePlanError) as caught:
            solver.result(LONG_S)
        assert "target 0.9; pin *.layers.1.*=fp8; the best reachable" in str(caught.value)
        solver.submit(PROBLEM, PlanSettings(policy="min-abs-err"))
        with pytest.raises(UsageError, match="abs_error"):
            solver.result(LONG_S)
        scored = problem_of([[0.0, 1.0]] * 3, scores=[{"abs_error": 1.0}] * 3)
        solver.submit(scored, PlanSettings(policy="min-abs-err"))
        assert solver.result(LONG_S).policy == "min-abs-err"
        assert child_since(before) == child


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (faulty("os.kill(os.getpid(), signal.SIGKILL)"), "SIGKILL"),
        (faulty("print('{\"plan\": ')"), "invalid reply"),
        (answering({"error": "UsageError"}), "invalid reply"),
        (answering({"plan": plan_of(["fp8"] * 2).to_dict()}), "the plan does not have"),
        (answering({"plan": plan_of(["fp8"] * 3, iteration=9).to_dict()}), "plan of iteration 9"),
        (answering({"plan": {**WRONG, "digest": "0" * 64}}), "does not match its linears"),
        (answering({"plan": {**WRONG, "version": 1}}), "version"),
        (answering({"plan": {**WRONG, "efficiency": "all"}}), "efficiency"),
        (answering({"plan": {**WRONG, "linears": {"a": {"fprop": "fp99"}}}}), "invalid reply"),
        (answering({"plan": None}), "invalid reply"),
        (answering({"error": ["a"], "message": 1}), "'a'"),
        (answering([]), "invalid reply"),
        (answering("error"), "invalid reply"),
        (faulty("print('[' * 100000)"), "invalid reply"),
        (faulty("sys.stdout.write('half a line')"), r"without an answer \(exit status 0\)"),
        (faulty("os.abort()"), "SIGABRT"),
        (["/nonexistent/worker"], "cannot be started"),
    ],
)
def test_failures_are_errors_and_the_next_submit_starts_a_new_child(
    command: list[str], word: str
) -> None:
    with closing(SolverProcess(command)) as solver:
        used = set()
        for _ in range(2):
            before = children()
            solver.submit(PROBLEM, PlanSettings())
            with pytest.raises(PlanningError, match=word):
                solver.result(LONG_S)
            used |= children() - before
            assert not any(child.is_running() for child in used)


def test_a_reply_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_process, "MAX_REPLY", 10_000)
    with closing(SolverProcess(faulty("while True: sys.stdout.write('x' * 1000)"))) as solver:
        solver.submit(PROBLEM, PlanSettings())
        with pytest.raises(PlanningError, match="without an answer"):
            solver.result(LONG_S)


def test_a_wrong_plan_brings_a_new_process() -> None:
    """The plan fits the model, and its digest its linears; the run's rules refuse it."""
    before = children()
    late = {"status": "optimal", "objective": 6.0, "efficiency": 1.0, "stages": [1.0]}
    wrong = plan_of(["fp4"] * 3, iteration=4).to_dict() | late | {"target": 0.3}
    with closing(SolverProcess(answering({"plan": wrong}))) as process:
        solver = Solver(PlanSettings(pins=(("*.layers.1.*", "fp8"),)), Control(), process)
        first = child_since(before)
        current = plan_of(["fp8"] * 3)
        for apply_at in (5, 6):
            with pytest.raises(PlanningError, match=r"plan is wrong: .* pin .* demands fp8"):
                solver.plan_of(PendingProblem(4, apply_at, PROBLEM), current)
        assert not first.is_running()
        right = Solver(PlanSettings(), Control(), process)  # without the pin it is a plan
        plan, _ = right.plan_of(PendingProblem(4, 5, PROBLEM), current)
        assert options_of(PrecisionPlan.from_dict(plan)) == ["fp4"] * 3


def test_a_problem_that_is_asked_twice_is_solved_once() -> None:
    """Megatron may repeat the iteration before which a plan is due."""

    class Once:
        def __init__(self) -> None:
            self.num_asked = 0

        def submit(self, *_: Any) -> None:
            self.num_asked += 1

        def result(self, timeout_s: float) -> PrecisionPlan:
            return make_plan(PROBLEM, PlanSettings(), iteration=4)

    process: Any = Once()
    solver = Solver(PlanSettings(), Control(), process)
    pending = PendingProblem(4, 5, PROBLEM)
    current = plan_of(["fp8"] * 3)
    solver.begin(pending, current)
    first, _ = solver.plan_of(pending, current)
    again, _ = solver.plan_of(pending, current)
    assert again is not first and again == first and process.num_asked == 1
    solver.begin(PendingProblem(6, 8, PROBLEM), current)
    assert process.num_asked == 2


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("raise ImportError('libortools.so: no such file')", "exit status 1: ImportError: libort"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_broken_or_tools_are_reported_at_the_start_and_plans_that_do_not_need_them_are_made(
    body: str,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As `megatron-snip plan` does, which imports them only where a plan needs them."""
    package = tmp_path / "ortools"
    package.mkdir()
    (package / "__init__.py").write_text(body + "\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    program += (
        "import os, megatron_snip.planning.solver_process as w; w.serve(os.getppid(), [], [])"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with closing(SolverProcess([sys.executable, "-c", program])) as solver:
        solver.submit(PROBLEM, PlanSettings())
        assert solver.result(LONG_S).linears == make_plan(PROBLEM, PlanSettings()).linears
    warning = capfd.readouterr().err
    assert f"importing OR-Tools ends with {how}" in warning and "Install ortools again" in warning
    assert "Traceback" not in warning


def test_a_solver_without_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The child's limit is real; it answers, and works again on what fits."""
    monkeypatch.setattr(solver_process, "loaded_plugins", lambda: ("tests.nightly.hungry",))
    monkeypatch.setattr(plugins, "_loaded", {})
    known = policies.POLICIES
    monkeypatch.setitem(known, "hungry", known["snip"])  # gone again after the test
    monkeypatch.delitem(sys.modules, "tests.nightly.hungry", raising=False)
    load_plugins(["tests.nightly.hungry"])
    with closing(SolverProcess()) as solver:
        for policy in ("hungry", "snip"):
            solver.submit(PROBLEM, PlanSettings(policy=policy))
            if policy == "hungry":
                with pytest.raises(PlanningError, match="the solver process is out of memory"):
                    solver.result(LONG_S)
        assert solver.result(LONG_S).policy == "snip"
    assert "Traceback" not in capfd.readouterr().err


def test_a_plugin_beside_the_script_is_in_the_child_and_may_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_script.py").write_text(
        "from dataclasses import replace\n"
        "from megatron_snip.planning.policies import POLICIES\n"
        "print('our plugin is loaded')\n"
        "POLICIES['beside'] = replace(POLICIES['snip'], name='beside')\n"
    )
    (tmp_path / "types.py").write_text("raise ImportError('the wrong module')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_loaded", {})
    try:
        load_plugins(["beside_script"])
        with closing(SolverProcess()) as solver:
            solver.submit(PROBLEM, PlanSettings(policy="beside"))
            assert solver.result(LONG_S).policy == "beside"
    finally:
        policies.POLICIES.pop("beside", None)


def test_a_child_that_hangs_is_ended_and_replaced(tmp_path: Path) -> None:
    works = tmp_path / "works"
    program = f"import os, time\nif not os.path.exists({str(works)!r}): time.sleep(600)\n"
    program += f"os.execv({sys.executable!r}, {worker_command()!r})"
    before = children()
    with closing(SolverProcess([sys.executable, "-c", program])) as solver:
        solver.submit(PROBLEM, PlanSettings())
        hung = child_since(before)
        with pytest.raises(PlanningError, match="did not answer within"):
            solver.result(0.2)
        assert not hung.is_running()
        works.touch()
        solver.submit(PROBLEM, PlanSettings())
        assert solver.result(LONG_S).status == "optimal"


def test_submitting_does_not_wait_for_a_child_that_does_not_read() -> None:
    large = problem_of([[0.0, 1.0]] * 5000)  # far larger than a pipe's buffer
    before = children()
    with closing(SolverProcess(["sleep", "600"])) as solver:
        with pytest.raises(PlanningError, match="no plan was submitted"):
            solver.result(0.1)
        solver.submit(large, PlanSettings(), iteration=8)
        working = child_since(before)
        solver.submit(PROBLEM, PlanSettings())  # drops the plan of iteration 8
        assert not working.is_running() and child_since(before) != working
        with pytest.raises(PlanningError, match="did not answer"):
            solver.result(0.1)
    with pytest.raises(AssertionError, match="closed"):
        solver.submit(PROBLEM, PlanSettings())
    request = PlanRequest(problem=large, settings=PlanSettings(), previous=None, iteration=8)
    assert max(map(len, request.json_pieces())) < 1000  # each one holds the interpreter lock


def test_output_of_the_solver_is_no_answer() -> None:
    program = (
        "import os\n"
        "import megatron_snip.planning.solver_process as worker\n"
        "make_plan = worker.make_plan\n"
        "def chatty(*arguments):\n"
        "    print('solver chatter')\n"
        "    return make_plan(*arguments)\n"
        "worker.make_plan = chatty\n"
        "worker.serve(os.getppid(), [], [])\n"
    )
    with closing(SolverProcess([sys.executable, "-c", program])) as solver:
        solver.submit(PROBLEM, PlanSettings())
        assert solver.result(LONG_S).status == "optimal"


def test_the_worker_ends_with_its_parent_even_where_its_input_stays_open() -> None:
    # The parent prints the worker's pid and dies; this process holds the worker's stdin open.
    reader, writer = os.pipe()
    program = (
        "import subprocess, sys\n"
        "from megatron_snip.planning.solver_process import worker_command, worker_environment\n"
        "p = subprocess.Popen(worker_command(), stdin=int(sys.argv[1]), env=worker_environment(),\n"
        "                     stdout=subprocess.DEVNULL)\n"
        "print(p.pid)\n"
    )
    command = [sys.executable, "-c", program, str(reader)]
    printed = subprocess.check_output(command, pass_fds=(reader,), text=True, timeout=600)
    stat = Path(f"/proc/{int(printed)}/stat")
    try:
        deadline = time.monotonic() + 600
        while _runs(stat) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _runs(stat)
    finally:
        os.close(reader)
        os.close(writer)


def _runs(stat: Path) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
