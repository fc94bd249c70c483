"""Local errors of options, read from the divergences that a run writes beside its problems.

    {"version": 1, "step": int,
     "linears": [{"name": str, "options": {OPTION: {"abs_error": number | null, ...}}}]}

Policies that score by local error need them; a problem file holds only what the integer program
needs. Keys that no policy reads are passed over: the file has other readers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.files import read_json
from megatron_snip.planning.policies import Metrics


def default_statistics(problem: Path) -> Path | None:
    """Return RUN/divergences/<step>.json for RUN/problems/<step>.json, if there is one."""
    beside = problem.resolve().parent.parent / "divergences" / problem.name
    return beside if problem.resolve().parent.name == "problems" and beside.is_file() else None


def read_metrics(path: Path) -> Metrics:
    """Read a divergences file.

    Raises:
        UsageError: if the file is missing, not JSON, or of another form.
    """
    source = f"statistics file '{path}'"
    value = read_json(path, "statistics file")
    if not isinstance(value, dict) or value.get("version") != 1:
        raise UsageError(f"{source} is not a divergences file of version 1")
    linears = value.get("linears")
    if not isinstance(linears, list):
        raise UsageError(f"{source} has no list 'linears'")
    return dict(_linear(entry, source) for entry in linears)


def _linear(entry: Any, source: str) -> tuple[str, dict[str, dict[str, float | None]]]:
    name = entry.get("name") if isinstance(entry, dict) else None
    options = entry.get("options") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not isinstance(options, dict):
        raise UsageError(f"{source}: every linear needs a 'name' and 'options'")
    return name, {option: _numbers(values, name, source) for option, values in options.items()}


def _numbers(values: Any, name: str, source: str) -> dict[str, float | None]:
    if not isinstance(values, dict):
        raise UsageError(f"{source}: options of '{name}' must be objects of numbers")
    return {
        key: None if value is None else float(value)
        for key, value in values.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
