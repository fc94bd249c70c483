"""Keep of a run directory what belongs to the steps before a checkpoint.

The run that goes on makes the later steps again, and its files then read as if it had never
stopped: one line a step, one file a refresh.
"""

from __future__ import annotations

from pathlib import Path

from megatron_snip.errors import UsageError
from megatron_snip.files import parse_json, write_atomic

_BY_STEP = ("plans", "problems", "divergences")


def keep_steps_before(run_dir: Path, step: int) -> None:
    """Drop the files and lines of step `step` (0-based) and later ones.

    Args:
        run_dir: may lack any of the files, or not exist.
        step: training steps done at the checkpoint.
    """
    for kind in _BY_STEP:
        for file in (run_dir / kind).glob("*.json"):
            if file.stem.isdecimal() and int(file.stem) >= step:
                file.unlink()
    metrics = run_dir / "metrics.jsonl"
    if metrics.is_file():
        lines = metrics.read_bytes().decode(errors="replace").split("\n")
        kept = [line for line in lines if _is_before(line, step)]
        write_atomic(metrics, "".join(f"{line}\n" for line in kept))


def _is_before(line: str, step: int) -> bool:
    try:
        found = parse_json(line, "metrics.jsonl")["step"]
    except (UsageError, KeyError, TypeError):
        return False  # a line that a crashed machine has cut or spoilt
    return isinstance(found, int) and 0 <= found < step
