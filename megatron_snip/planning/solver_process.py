"""SolverProcess: plans are made outside of the training process, and training never waits.

A child process keeps OR-Tools loaded and answers one request at a time over pipes. It is not a
thread, because building a model holds the interpreter lock. It does not use multiprocessing, which
would import the user's training script a second time.

    submit(...)   after the iteration that measured; returns at once
    ready()       any time; never blocks
    result(t)     before the iteration that applies; the plan, or the error as an exception

A failure of the child (crash, hang, invalid reply) is an exception of `result` and ends that child;
the next `submit` starts a new one. Called on the coordinator rank only, from one thread.

The child is `python -m megatron_snip.planning.solver_process PARENT_PID`. It has a low priority,
ignores SIGINT (the trainer handles Ctrl-C) and exits with its parent, even during a solve.

Each message is one line of JSON:

    request   {"settings", "previous": plan | null, "iteration", "problem"}
    reply     {"plan"}  or  {"error": name of the exception's class, "message"}
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import megatron_snip
from megatron_snip.errors import InfeasiblePlanError, PlanningError, SnipError, UsageError
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings

_REAP_S = 5.0
_PARENT_CHECK_S = 1.0

NICENESS = 10
"""Added to the priority of the child."""

_ERRORS = {error.__name__: error for error in (InfeasiblePlanError, UsageError, PlanningError)}
"""Errors of the worker that keep their class."""


class PlanRequest(BaseModel):
    """The arguments of `make_plan`."""

    problem: PlanningProblem
    settings: PlanSettings
    previous: PrecisionPlan | None
    iteration: int

    def json_pieces(self) -> Iterator[str]:
        """Yield the request's line in pieces, so that no single one holds the interpreter lock."""
        yield self.model_dump_json(exclude={"problem"})[:-1] + ', "problem": '
        for line in self.problem.json_lines():
            yield line.replace("\n", "")
        yield "}\n"

    def plan_of(self, reply: str) -> PrecisionPlan:
        """Read the reply to this request.

        Raises:
            InfeasiblePlanError, UsageError: with the worker's message.
            PlanningError: if the worker failed in another way, or the line is no valid reply.
        """
        try:
            value = json.loads(reply)
            if "error" in value:
                name, message = value["error"], value["message"]
                if name in _ERRORS:
                    raise _ERRORS[name](message)
                raise PlanningError(f"{name}: {message}")
            plan = PrecisionPlan.from_dict(value["plan"])
            plan.check_against(self.problem.names)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanningError(
                f"invalid reply of the solver process ({type(error).__name__}): {reply[:80]!r}"
            ) from None
        if plan.iteration != self.iteration:
            raise PlanningError(f"the solver process sent the plan of iteration {plan.iteration}")
        return plan


class SolverProcess:
    """A persistent solver process; see the file's description.

    Args:
        command: what to start; by default the worker.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._child = _Child(worker_command() if command is None else list(command))
        self._request: PlanRequest | None = None
        self._answer: Future[PrecisionPlan] = Future()
        self._end = weakref.finalize(self, _kill_in_creator, self._child, os.getpid())
        with contextlib.suppress(OSError):  # it loads OR-Tools now; `result` reports a failure
            self._child.start()

    def submit(
        self,
        problem: PlanningProblem,
        settings: PlanSettings,
        previous: PrecisionPlan | None = None,
        iteration: int = 0,
    ) -> None:
        """Start planning and return at once; the arguments are `make_plan`'s.

        A finished plan whose `result` was not called is dropped.

        Raises:
            PlanningError: if the process is closed or the last plan is not finished.
        """
        if not self._end.alive:
            raise PlanningError("the solver process is closed")
        if self._request is not None and not self._answer.done():
            raise PlanningError(
                f"the plan of iteration {self._request.iteration} is not finished; "
                "take its result before submitting the next"
            )
        self._request = PlanRequest(
            problem=problem, settings=settings, previous=previous, iteration=iteration
        )
        self._answer = Future()
        job = (self._child, self._request, self._answer)
        threading.Thread(target=_answer, args=job, name="snip-solver", daemon=True).start()

    def ready(self) -> bool:
        """Whether `result` would return at once. Never blocks."""
        return self._request is not None and self._answer.done()

    def result(self, timeout_s: float) -> PrecisionPlan:
        """Return the plan of the last `submit`; each plan is returned once.

        Args:
            timeout_s: seconds to wait for it; after them the child is ended.

        Raises:
            InfeasiblePlanError: no plan satisfies the constraints.
            UsageError: the arguments do not fit each other.
            PlanningError: the child crashed, hung or sent an invalid reply, or nothing was
                submitted.
        """
        request, self._request = self._request, None
        if request is None:
            raise PlanningError("no plan was submitted to the solver process")
        try:
            return self._answer.result(timeout_s)
        except TimeoutError:
            self._child.kill()
            raise PlanningError(
                f"the solver process did not answer within {timeout_s:g} s; it was stopped"
            ) from None

    def close(self) -> None:
        """End the child; nothing can be submitted afterwards. May be called twice."""
        self._request = None
        self._end()


def worker_command() -> list[str]:
    """Return the command of the worker.

    -P removes the current directory from the child's import path: a user's `types.py` there must
    not replace the standard library's.
    """
    return [sys.executable, "-P", "-m", "megatron_snip.planning.solver_process", str(os.getpid())]


def worker_environment() -> dict[str, str]:
    """Return this process's environment, with this package first on the child's import path."""
    package_parent = str(Path(megatron_snip.__file__).resolve().parent.parent)
    paths = [package_parent, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


class _Child:
    """The process behind the pipes; started when needed, ended by `kill`."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def start(self) -> subprocess.Popen[str]:
        """Return the running process; start one if there is none. Raises OSError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                    errors="replace",
                    env=worker_environment(),
                    start_new_session=True,
                )
            return self._process

    def kill(self, process: subprocess.Popen[str] | None = None) -> int | None:
        """End a process, by default the current one; return its exit status."""
        with self._lock:
            victim = self._process if process is None else process
            if victim is self._process:  # its pipes close with the last thread that uses them
                self._process = None
        if victim is None:
            return None
        victim.kill()  # does nothing to a process that has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            victim.wait(_REAP_S)
        return victim.returncode


def _answer(child: _Child, request: PlanRequest, answer: Future[PrecisionPlan]) -> None:
    """Run one exchange with the child (in a thread of its own)."""
    try:
        answer.set_result(_exchange(child, request))
    except SnipError as error:
        answer.set_exception(error)
    except Exception as error:
        kind = type(error).__name__
        answer.set_exception(PlanningError(f"solver process: {kind}: {error}"))


def _exchange(child: _Child, request: PlanRequest) -> PrecisionPlan:
    try:
        process = child.start()
    except OSError as error:
        raise PlanningError(f"the solver process cannot be started: {error}") from None
    assert process.stdin is not None and process.stdout is not None
    line = ""
    with contextlib.suppress(OSError, ValueError):  # it died or was killed: there is no line
        process.stdin.writelines(request.json_pieces())
        process.stdin.flush()
        line = process.stdout.readline()
    if not line.endswith("\n"):
        status = child.kill(process)
        raise PlanningError(f"the solver process ended without an answer (status {status})")
    try:
        return request.plan_of(line)
    except PlanningError:
        child.kill(process)  # a child with an invalid reply is not used again
        raise


def _kill_in_creator(child: _Child, creator: int) -> None:
    """End the child when the process that made it ends; a forked copy of it does nothing."""
    if os.getpid() == creator:
        child.kill()


def serve(parent: int) -> None:
    """In the child: answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    # The end of stdin is not seen during a solve, nor while another child of the parent holds a
    # copy of the pipe (data loader workers made by fork do).
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output of this process goes to stderr
    for line in sys.stdin:
        replies.write(answer(line))
        replies.flush()


def answer(line: str) -> str:
    """Return the reply's line to a request's line."""
    reply: dict[str, Any]
    try:
        r = PlanRequest.model_validate_json(line)
        reply = {"plan": make_plan(r.problem, r.settings, r.previous, r.iteration).to_dict()}
    except Exception as error:  # every failure is reported, and training goes on
        reply = {"error": type(error).__name__, "message": str(error)}
    return json.dumps(reply) + "\n"


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
