"""The solver process: `python -m megatron_snip.planning.worker PARENT_PID`.

It reads one request a line from stdin, plans, and writes one reply a line to stdout, until stdin
ends. OR-Tools is imported at the start, so that the first request finds it warm. The process is
nice (it must not take cycles from training), ignores SIGINT (the trainer's Ctrl-C is the
trainer's business) and leaves when its parent is gone, even in the middle of a solve.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TextIO

from megatron_snip.planning.exchange import decode_request, encode_error, encode_plan
from megatron_snip.planning.planner import make_plan

NICENESS = 10
_PARENT_CHECK_S = 1.0


def main(arguments: list[str]) -> int:
    """Serve requests until stdin ends; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    if arguments:
        _leave_with_parent(int(arguments[0]))
    replies = _take_stdout()
    for line in sys.stdin:
        replies.write(_answer(line))
        replies.flush()
    return 0


def _answer(line: str) -> str:
    number = -1
    try:
        request = decode_request(line)
        number = request.number
        plan = make_plan(
            request.problem, request.settings, request.previous, request.step, request.metrics
        )
    except Exception as error:  # whatever it is, the trainer must hear of it and go on
        return encode_error(number, error)
    return encode_plan(number, plan)


def _take_stdout() -> TextIO:
    """Keep stdout for replies; whatever else prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _leave_with_parent(parent: int) -> None:
    """End the process within seconds of the parent's death.

    The end of stdin says the same, but it is not seen during a solve, nor while another child
    of the parent holds a copy of the pipe (data loader workers made by fork do).
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
