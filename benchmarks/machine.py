"""Where results are written, and which machine, software and command they come from."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_snip.version import versions

RESULTS = Path(__file__).parent / "results"

PACKAGES = ("triton", "torchao", "nvidia-cublas", "nvidia-cublas-cu12")
"""Distributions whose versions a result records, beside those that a run records."""


def machine() -> dict[str, Any]:
    """Return command, commit, date, processor, cores, GPU (or None) and versions."""
    found = {**versions(), "cuda": torch.version.cuda}
    return {
        **_origin(),
        "versions": found | {package: _version(package) for package in PACKAGES},
    }


def has_gpu() -> bool:
    """Return whether there is a GPU, also where torch.cuda is redirected to the CPU."""
    return bool(torch.version.cuda) and Path("/dev/nvidiactl").exists()


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result with its machine as JSON, atomically: it can be updated while it is read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    partial.replace(path)


def append_row(path: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Append a row to a JSON-lines file, below a line with its origin; return both as one.

    The row is on disk when this returns. What a killed process left of a line is removed.
    """
    origin = {**_origin(), "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(path)
    known = bool(rows) and origin.items() <= rows[-1].items()
    lines = (row,) if known else (origin, row)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    with path.open("ab") as file:
        file.truncate(_complete_size(path))
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    return {**origin, **row}


def _complete_size(path: Path) -> int:
    """Return the bytes of a file up to the end of its last complete line."""
    return path.read_bytes().rfind(b"\n") + 1


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file, each with the origin above it; none without a file.

    A last line without its end was cut off when its process was killed, and is left out.
    """
    rows: list[dict[str, Any]] = []
    origin: dict[str, Any] = {}
    if not path.exists():
        return rows
    for line in path.read_bytes()[: _complete_size(path)].splitlines():
        row = json.loads(line)
        if "command" in row:
            origin = row
        else:
            rows.append({**origin, **row})
    return rows


def _origin() -> dict[str, Any]:
    return {
        "command": f"python -m {_module()} {' '.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": _gpu_name() if has_gpu() else None,
    }


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem


def _commit() -> str:
    bundled = Path(__file__).parents[1] / "COMMIT"  # of benchmarks.start
    if bundled.exists():
        return bundled.read_text().strip()
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return process.communicate()[0].decode().strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu_name() -> str | None:
    try:
        return torch.cuda.get_device_name()
    except (RuntimeError, AssertionError):  # hidden from this process
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
