"""The solver process: `python -m megatron_snip.planning.solver_worker PARENT_PID`.

It reads one request a line from stdin, plans, and writes one reply a line to stdout, until stdin
ends; see `solver_process.py`. OR-Tools is imported at the start. The process has a low priority,
ignores SIGINT (the trainer handles Ctrl-C) and exits with its parent, even during a solve.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from megatron_snip.errors import InfeasiblePlanError, SnipError, UsageError
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.solver_process import PlanRequest

NICENESS = 10
_PARENT_CHECK_S = 1.0


def main(arguments: list[str]) -> int:
    """Serve requests until stdin ends; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    if arguments:
        # The end of stdin is not seen during a solve, nor while another child of the parent holds
        # a copy of the pipe (data loader workers made by fork do).
        watch = threading.Thread(target=_exit_with_parent, args=(int(arguments[0]),), daemon=True)
        watch.start()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output of this process goes to stderr
    for line in sys.stdin:
        replies.write(answer(line))
        replies.flush()
    return 0


def answer(line: str) -> str:
    """Return the reply's line to a request's line."""
    number = -1
    try:
        request = PlanRequest.from_json(line)
        number = request.number
        plan = make_plan(request.problem, request.settings, request.previous, request.iteration)
    except Exception as error:  # every failure is reported, and training goes on
        return json.dumps({"id": number, **_failure(error)}) + "\n"
    return json.dumps({"id": number, "plan": plan.to_dict()}) + "\n"


def _failure(error: Exception) -> dict[str, Any]:
    if isinstance(error, InfeasiblePlanError):
        details = {"conflicts": list(error.conflicts), "best_target": error.best_target}
        return {"error": "infeasible", "message": str(error), **details}
    kind = "usage" if isinstance(error, UsageError) else "planning"
    name = "" if isinstance(error, SnipError) else f"{type(error).__name__}: "
    return {"error": kind, "message": f"{name}{error}"}


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
