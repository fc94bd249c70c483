"""SolverProcess: plans are made in a child process while training continues.

A child process keeps OR-Tools loaded and answers one request at a time over pipes. It is not a
thread, because building a model holds the interpreter lock. It does not use multiprocessing, which
would import the user's training script a second time.

    submit(...)   is called after a measured iteration; returns at once
    ready()       may be called at any time; never blocks
    result(t)     is called before the iteration that applies the plan; returns the plan, or raises
                  the child's error

A failure of the child (crash, hang, invalid reply) is an exception of `result` and ends that child;
the next `submit` starts a new one. The caller checks the plan against the problem, and calls
`replace` if it is wrong. Used on rank 0 only, from one thread.

The child is `python -m megatron_snip.planning.solver_process PARENT_PID`. It has a low priority,
ignores SIGINT (the trainer handles Ctrl-C) and exits with its parent, even during a solve. Where
the machine runs out of memory, Linux ends the child before any rank.

Each message is one line of JSON:

    request   {"settings", "previous": plan | null, "iteration", "problem"}
    reply     {"plan"}  or  {"error": name of the exception's class, "message"}
"""

import contextlib
import json
import logging
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
from megatron_snip.errors import (
    InfeasiblePlanError,
    PlanningError,
    UsageError,
    exit_text,
    known_failure,
    shortened,
)
from megatron_snip.log import log_failure
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.plugins import load_plugins, loaded_plugins, plugin_folders

logger = logging.getLogger(__name__)

_REAP_S = 5.0
_PARENT_CHECK_S = 1.0

NICENESS = 10
"""Added to the niceness of the child, which lowers its priority."""

OOM_SCORE = 1000
"""The child's `oom_score_adj`: the first process that the kernel ends for its memory."""

MAX_REPLY = 2**28
"""Characters of a reply: a child that never ends its line must not fill this process's memory."""

_ERRORS = {error.__name__: error for error in (InfeasiblePlanError, UsageError, PlanningError)}
"""Errors of the child that have the same class in `result`."""


class PlanRequest(BaseModel):
    """The arguments of `make_plan`."""

    problem: PlanningProblem
    settings: PlanSettings
    previous: PrecisionPlan | None
    iteration: int

    def json_pieces(self) -> Iterator[str]:
        """Yield the request's line in pieces, so that no single one holds the interpreter lock."""
        others = self.model_dump_json(exclude={"problem"})
        yield others.removesuffix("}") + ', "problem": '
        for line in self.problem.json_lines():
            yield line.replace("\n", "")
        yield "}\n"

    def plan_of(self, reply: str) -> PrecisionPlan:
        """Read the reply to this request.

        Raises:
            InfeasiblePlanError, UsageError: what the child found wrong with the request.
            PlanningError: if the child failed in another way, or the line is no valid reply.
        """
        failure: Exception | None = None
        try:
            value = json.loads(reply)
            if "error" in value:
                name = str(value["error"])
                message = str(value["message"])
                known = _ERRORS.get(name)
                failure = PlanningError(f"{name}: {message}") if known is None else known(message)
            else:
                plan = PrecisionPlan.from_dict(value["plan"])
                plan.check_against(self.problem.names)
        except (UsageError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = str(error) if isinstance(error, UsageError) else type(error).__name__
            text = f"invalid reply of the solver process ({why}): {reply[:80]!r}"
            raise PlanningError(text) from None
        if failure is not None:
            raise failure  # not within the try, where a UsageError is an invalid reply
        if plan.iteration != self.iteration:
            raise PlanningError(f"the solver process sent the plan of iteration {plan.iteration}")
        return plan


class SolverProcess:
    """A persistent solver process; see the file's description.

    Args:
        command: The command line of the child; by default `worker_command()`.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = worker_command() if command is None else list(command)
        self._children: list[subprocess.Popen[str]] = []  # one, unless none could be started
        self._request: PlanRequest | None = None
        self._answer: Future[PrecisionPlan] = Future()
        self._end = weakref.finalize(self, _kill_in_creator, self._children, os.getpid())
        # Started now, not at the first problem: importing OR-Tools takes seconds on a loaded
        # machine.
        with contextlib.suppress(OSError):  # `submit` tries again, and `result` reports a failure
            self._running_child()

    def submit(
        self,
        problem: PlanningProblem,
        settings: PlanSettings,
        previous: PrecisionPlan | None = None,
        iteration: int = 0,
    ) -> None:
        """Start planning and return at once; the arguments are `make_plan`'s.

        The plan of the last `submit` is dropped if `result` was not called; a child that still
        works on it is ended. `result` raises if the child cannot be started.
        """
        assert self._end.alive, "the solver process is closed"
        if self._request is not None and not self._answer.done():
            # A solve cannot be interrupted otherwise, and its reply would be read as the next
            # one's.
            _kill(*self._children)
        self._request = PlanRequest(
            problem=problem, settings=settings, previous=previous, iteration=iteration
        )
        self._answer = Future()
        try:
            job = (self._running_child(), self._request, self._answer)
            threading.Thread(target=_exchange, args=job, name="snip-solver", daemon=True).start()
        except (OSError, RuntimeError) as error:  # the machine gives no process, or no thread
            text = f"the solver process cannot be started: {error}"
            self._answer.set_exception(PlanningError(text))

    def result(self, timeout_s: float) -> PrecisionPlan:
        """Return the plan of the last `submit`; each plan is returned once.

        Args:
            timeout_s: Seconds to wait for it; after them the child is ended.

        Raises:
            InfeasiblePlanError: no plan satisfies the constraints.
            UsageError: the arguments do not fit each other.
            PlanningError: the child crashed, hung or sent an invalid reply, or nothing was
                submitted.
        """
        request = self._request
        self._request = None
        if request is None:
            raise PlanningError("no plan was submitted to the solver process")
        try:
            return self._answer.result(timeout_s)
        except TimeoutError:
            _kill(*self._children)
            raise PlanningError(
                f"the solver process did not answer within {timeout_s:g} s; it was stopped"
            ) from None

    def replace(self) -> None:
        """End the child, which gave a wrong plan; the next `submit` starts a new one."""
        _kill(*self._children)

    def close(self) -> None:
        """End the child; nothing can be submitted afterwards. May be called twice."""
        self._request = None
        self._end()

    def _running_child(self) -> subprocess.Popen[str]:
        """Return the child, a new one if it has ended. Raises OSError."""
        if not self._children or self._children[0].poll() is not None:
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=worker_environment(),
                start_new_session=True,  # signals to the job's process group are the trainer's
            )
            self._children[:] = [child]  # the pipes of the former one close with their last user
        return self._children[0]


def worker_command() -> list[str]:
    """Return the command that starts the child."""
    module = "megatron_snip.planning.solver_process"
    # A plugin may lie in the current directory or beside the script, so the child looks there last.
    folders = os.pathsep.join(plugin_folders())
    # -P removes the current directory from the child's import path: a user's `types.py` there must
    # not replace the standard library's.
    return [sys.executable, "-P", "-m", module, str(os.getpid()), folders, *loaded_plugins()]


def worker_environment() -> dict[str, str]:
    """Return this process's environment, with this package first on the child's import path."""
    package_parent = str(Path(megatron_snip.__file__).resolve().parent.parent)
    paths = [package_parent, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _exchange(
    child: subprocess.Popen[str], request: PlanRequest, future: Future[PrecisionPlan]
) -> None:
    """Send a request to the child and wait for its reply (in a thread of its own)."""
    assert child.stdin is not None and child.stdout is not None
    reply = ""
    try:
        with contextlib.suppress(OSError, ValueError):  # it died or was killed: there is no reply
            child.stdin.writelines(request.json_pieces())
            child.stdin.flush()
            reply = child.stdout.readline(MAX_REPLY)
        if not reply.endswith("\n"):
            # Its output ends a little before it does; a kill would replace its own exit status.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_REAP_S)
            how = "it is stopped" if child.returncode is None else exit_text(child.returncode)
            raise PlanningError(f"the solver process ended without an answer ({how})")
        future.set_result(request.plan_of(reply))
    except (InfeasiblePlanError, UsageError) as error:
        future.set_exception(error)
    except Exception as error:
        _kill(child)  # a child with an invalid reply is not used again
        text = log_failure(logger, "the exchange with the solver process", error)
        if not isinstance(error, PlanningError):
            error = PlanningError(f"solver process: {text}")
        future.set_exception(error)


def _kill(*children: subprocess.Popen[str]) -> None:
    for child in children:
        child.kill()  # does nothing to a process that has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_REAP_S)


def _kill_in_creator(children: list[subprocess.Popen[str]], creator: int) -> None:
    """End the child when the process that made it ends."""
    # A data loader worker made by fork has a copy of the finalizer, and ends earlier.
    if os.getpid() == creator:
        _kill(*children)


def serve(parent: int, folders: Sequence[str], plugins: Sequence[str]) -> None:
    """In the child: answer requests until stdin ends.

    Args:
        parent: process whose end ends the child.
        folders: where else plugins are looked for.
        plugins: modules to import.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output of this process, such as a plugin's, goes to stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text(f"{OOM_SCORE}\n")
    # The end of stdin is not seen during a solve, nor while another child of the parent holds a
    # copy of the pipe (data loader workers made by fork do).
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    sys.path += folders
    load_plugins(plugins)
    broken = _broken_solver()
    if broken is None:
        import ortools.sat.python.cp_model  # noqa: F401  # so that the first solve does not wait
    else:
        # Many plans are proven optimal without it. `megatron-snip plan` makes them, and so does
        # this process.
        logger.warning("snip: %s; a plan that needs it will fail. Install ortools again", broken)

    for line in sys.stdin:
        replies.write(answer(line))
        replies.flush()


def _broken_solver() -> str | None:
    """In the child: return why OR-Tools cannot be imported; None if it can."""
    # In a process of its own, because a broken library may end the process that imports it.
    command = [sys.executable, "-P", "-c", "import ortools.sat.python.cp_model"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    reason = (done.stderr.strip().splitlines() or [""])[-1]
    ended = f"importing OR-Tools ends with {exit_text(done.returncode)}"
    return f"{ended}: {shortened(reason, 300)}" if reason else ended


def answer(line: str) -> str:
    """In the child: return the line of JSON that replies to a request's line."""
    reply: dict[str, Any]
    try:
        request = PlanRequest.model_validate_json(line)
        plan = make_plan(request.problem, request.settings, request.previous, request.iteration)
        reply = {"plan": plan.to_dict()}
    except MemoryError:
        # The text of a MemoryError is empty.
        reply = {"error": PlanningError.__name__, "message": "the solver process is out of memory"}
    except Exception as error:  # every failure is reported, and training goes on
        log_failure(logger, "solving", error)
        message = known_failure(error) or str(error)
        reply = {"error": type(error).__name__, "message": message}
    return json.dumps(reply) + "\n"


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(0)


if __name__ == "__main__":
    # An empty folder would be the current directory.
    plugin_places = [folder for folder in sys.argv[2].split(os.pathsep) if folder]
    serve(int(sys.argv[1]), plugin_places, sys.argv[3:])
