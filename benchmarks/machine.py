"""Where results are written, and which machine and software they come from."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_snip.reporting import provenance
from megatron_snip.reporting.provenance import has_gpu

__all__ = ["RESULTS", "has_gpu", "machine", "write_result"]

RESULTS = Path(__file__).parent / "results"

PACKAGES = ("triton", "torchao", "nvidia-cublas", "nvidia-cublas-cu12")
"""Beside those that a run records."""


def machine() -> dict[str, Any]:
    """Return date, processor, cores, GPU (or None) and versions, of what is timed here too."""
    found = provenance.machine()
    found["versions"] |= {package: _version(package) for package in PACKAGES}
    return found


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result with its machine as JSON; at once or not at all, so that it can be kept up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    partial.replace(path)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
