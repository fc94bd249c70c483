"""The real worker, spoken to over its pipes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from megatron_snip.planning.exchange import PlanRequest, decode_reply, encode_request
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import _environment, worker_command
from megatron_snip.planning.worker import NICENESS
from tests.unit.planning.build import options_of, problem_of

REQUEST = PlanRequest(1, problem_of([[0.0, 1.0]] * 2), PlanSettings(), None, 5, None)


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        worker_command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def ask(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()


def test_it_plans_answers_nonsense_with_an_error_and_goes_on(
    worker: subprocess.Popen[str],
) -> None:
    line = "".join(encode_request(REQUEST))
    plan = decode_reply(ask(worker, line), REQUEST)
    assert sorted(options_of(plan)) == ["fp4", "fp8"]
    assert plan.step == 5
    for nonsense in ("nonsense\n", "{}\n", "\n"):
        reply = json.loads(ask(worker, nonsense))
        assert (reply["id"], reply["error"]) == (-1, "planning")
    assert decode_reply(ask(worker, line), REQUEST).digest == plan.digest


def test_it_is_nice_and_ignores_the_keyboard(worker: subprocess.Popen[str]) -> None:
    ask(worker, "".join(encode_request(REQUEST)))  # it has started
    niceness = os.getpriority(os.PRIO_PROCESS, worker.pid)
    assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    os.kill(worker.pid, signal.SIGINT)
    assert ask(worker, "".join(encode_request(REQUEST)))
    assert worker.poll() is None


def test_it_ends_with_its_input(worker: subprocess.Popen[str]) -> None:
    ask(worker, "".join(encode_request(REQUEST)))
    assert worker.stdin is not None
    worker.stdin.close()
    assert worker.wait(30) == 0


def test_it_ends_with_its_parent_even_where_its_input_stays_open() -> None:
    # The parent prints the worker's pid and dies; this process holds the worker's stdin open.
    reader, writer = os.pipe()
    program = (
        "import subprocess, sys\n"
        "from megatron_snip.planning.solver_process import worker_command, _environment\n"
        "p = subprocess.Popen(worker_command(), stdin=int(sys.argv[1]), env=_environment(),\n"
        "                     stdout=subprocess.DEVNULL)\n"
        "print(p.pid)\n"
    )
    parent = subprocess.run(
        [sys.executable, "-c", program, str(reader)],
        pass_fds=(reader,),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    pid = int(parent.stdout)
    try:
        for _ in range(600):
            if not _runs(pid):
                break
            time.sleep(0.1)
        assert not _runs(pid)
    finally:
        os.close(reader)
        os.close(writer)


def _runs(pid: int) -> bool:
    """Whether the process exists and is more than an entry that nobody has collected yet."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
