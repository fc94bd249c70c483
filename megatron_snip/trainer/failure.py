"""How a rank tells the front process why it failed: a JSON file that torch's launcher names.

The launcher sets TORCHELASTIC_ERROR_FILE for every rank and reads `message` from the file itself,
so the file has its form, with three entries of ours beside.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["usage", "error", "crash"]
"""usage: the user's input; error: a reason told in one line; crash: a traceback."""


@dataclass(frozen=True)
class Failure:
    """Why a rank failed.

    Attributes:
        kind: see `Kind`.
        text: one line, or a traceback for a crash.
        time: seconds since the epoch.
    """

    kind: Kind
    text: str
    time: float


def write_failure(kind: Kind, text: str) -> bool:
    """Write this rank's failure where the launcher asks for it; return whether it does."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return False
    now = time.time()
    details = {"timestamp": str(int(now)), "py_callstack": text}
    content = {
        "message": {"message": text, "extraInfo": details},
        "kind": kind,
        "text": text,
        "time": now,
    }
    Path(file).write_text(json.dumps(content))
    return True


def read_failure(file: str) -> Failure | None:
    """Return what a rank wrote, or None if it wrote nothing that can be read."""
    try:
        content = json.loads(Path(file).read_text())
        kind = content["kind"]
        if kind not in get_args(Kind):
            return None
        return Failure(kind, str(content["text"]), float(content["time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
