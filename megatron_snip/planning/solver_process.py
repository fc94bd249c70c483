"""SolverProcess: plans made outside the training process, without ever making it wait.

A child process keeps OR-Tools warm and answers one request at a time over pipes. A child instead of
a thread, because building a model holds the interpreter lock; a plain child instead of
multiprocessing, because that would import the user's training script a second time.

    submit(...)   at the step that measured; returns at once
    ready()       any time; never blocks
    result(t)     at the step that applies; the plan, or the error as an exception

Whatever goes wrong in the child (crash, hang, garbage) is an exception of `result` and ends that
child; the next `submit` starts a fresh one. Called on the coordinator rank only, from one thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import megatron_snip
from megatron_snip.errors import PlanningError, SnipError
from megatron_snip.log import warn_once
from megatron_snip.planning.exchange import PlanRequest, decode_reply, encode_request
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.policies import Metrics
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings

_logger = logging.getLogger(__name__)
_REAP_S = 5.0


def worker_command() -> list[str]:
    """Return the command of the real worker.

    -P keeps the current directory off the child's import path: a user's `types.py` there must
    not become the standard library's.
    """
    return [sys.executable, "-P", "-m", "megatron_snip.planning.worker", str(os.getpid())]


def spare_threads(local_processes: int = 1) -> int:
    """Return how many threads a solver may use beside training, at least 1.

    Args:
        local_processes: training processes on this host, each of which keeps a core.
    """
    return max(1, len(os.sched_getaffinity(0)) - local_processes)


class SolverProcess:
    """A persistent solver process; see the file's description.

    Args:
        command: what to start; the real worker by default.
        local_processes: training processes on this host; the solver gets the cores they leave.
    """

    def __init__(self, command: Sequence[str] | None = None, local_processes: int = 1) -> None:
        self._command = list(command) if command is not None else worker_command()
        self._max_workers = spare_threads(local_processes)
        self._child = _Child(self._command)
        self._job: _Job | None = None
        self._count = 0
        self._end = weakref.finalize(self, _end_of_creator, self._child, os.getpid())
        with contextlib.suppress(OSError):  # warm up; if it cannot start, the first result says so
            self._child.start()

    def submit(
        self,
        problem: PlanningProblem,
        settings: PlanSettings,
        previous: PrecisionPlan | None = None,
        step: int = 0,
        metrics: Metrics | None = None,
    ) -> None:
        """Start planning and return at once; the arguments are `make_plan`'s.

        A finished plan that nobody asked for is dropped.

        Raises:
            PlanningError: if the process is closed or the plan before is still being made.
        """
        if not self._end.alive:
            raise PlanningError("the solver process is closed")
        if self._job is not None and not self._job.done.is_set():
            raise PlanningError(
                f"the plan of step {self._job.request.step} is still being made; "
                "take its result before submitting the next"
            )
        if settings.workers > self._max_workers:
            warn_once(
                _logger,
                f"solver threads limited to {self._max_workers} (asked for {settings.workers}): "
                "training keeps the other cores",
            )
            settings = settings.model_copy(update={"workers": self._max_workers})
        self._count += 1
        request = PlanRequest(self._count, problem, settings, previous, step, metrics)
        self._job = _Job(request, self._child)

    def ready(self) -> bool:
        """Whether `result` would return at once. Never blocks."""
        return self._job is not None and self._job.done.is_set()

    def result(self, timeout_s: float) -> PrecisionPlan:
        """Return the plan of the last `submit`; each plan is returned once.

        Args:
            timeout_s: seconds to wait for it; past them the child is ended.

        Raises:
            InfeasiblePlanError: no plan satisfies the rules; with conflicts and best target.
            UsageError: the arguments do not fit each other.
            PlanningError: the child crashed, hung or answered nonsense, or nothing was submitted.
        """
        job, self._job = self._job, None
        if job is None:
            raise PlanningError("no plan was submitted to the solver process")
        if not job.done.wait(timeout_s):
            self._child.kill()
            raise PlanningError(
                f"the solver process did not answer within {timeout_s:g} s; it was stopped"
            )
        if isinstance(job.outcome, PrecisionPlan):
            return job.outcome
        raise job.outcome

    def close(self) -> None:
        """End the child; nothing can be submitted afterwards. May be called twice."""
        self._job = None
        self._end()

    def __enter__(self) -> SolverProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Child:
    """The process behind the pipes; started when needed, ended by `kill`."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def start(self) -> subprocess.Popen[str]:
        """Return the running process; start one if there is none.

        Raises:
            OSError: if the command cannot be started.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                    errors="replace",
                    env=_environment(),
                    start_new_session=True,
                )
            return self._process

    def kill(self, process: subprocess.Popen[str] | None = None) -> int | None:
        """End the current process; return its exit status.

        Args:
            process: end this one instead, which may have been replaced already.
        """
        with self._lock:
            victim = self._process if process is None else process
            if victim is self._process:
                # Its pipes close with the last thread that uses them.
                self._process = None
        if victim is None:
            return None
        if victim.poll() is None:
            victim.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            victim.wait(_REAP_S)
        return victim.returncode


class _Job:
    """One request on its way, in a thread of its own.

    Attributes:
        request: what was asked.
        done: set when `outcome` is there.
        outcome: the plan, or the error to raise.
    """

    def __init__(self, request: PlanRequest, child: _Child) -> None:
        self.request = request
        self.done = threading.Event()
        self.outcome: PrecisionPlan | SnipError = PlanningError("no outcome")
        self._child = child
        threading.Thread(target=self._run, name="snip-solver", daemon=True).start()

    def _run(self) -> None:
        try:
            self.outcome = self._exchange()
        except SnipError as error:
            self.outcome = error
        except Exception as error:  # must not end the thread unheard
            self.outcome = PlanningError(f"solver process: {type(error).__name__}: {error}")
        self.done.set()

    def _exchange(self) -> PrecisionPlan:
        try:
            process = self._child.start()
        except OSError as error:
            raise PlanningError(f"the solver process cannot be started: {error}") from None
        assert process.stdin is not None and process.stdout is not None
        line = ""
        with contextlib.suppress(OSError, ValueError):  # it died or was killed: no line comes
            for piece in encode_request(self.request):
                process.stdin.write(piece)
            process.stdin.flush()
            line = process.stdout.readline()
        if not line.endswith("\n"):
            status = self._child.kill(process)
            raise PlanningError(f"the solver process ended without an answer (status {status})")
        try:
            return decode_reply(line, self.request)
        except PlanningError:
            self._child.kill(process)  # who answers nonsense once is not asked again
            raise


def _environment() -> dict[str, str]:
    """Return this environment, with this very package first on the child's import path."""
    package_parent = str(Path(megatron_snip.__file__).resolve().parent.parent)
    paths = [package_parent, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _end_of_creator(child: _Child, creator: int) -> None:
    """End the child at the end of the process that made it; a forked copy leaves it alone."""
    if os.getpid() == creator:
        child.kill()
