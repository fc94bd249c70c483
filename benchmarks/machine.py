"""Which machine and software a result comes from, and where results are written."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_snip.reporting.run_directory import versions

RESULTS = Path(__file__).parent / "results"

PACKAGES = ("triton", "torchao", "nvidia-cublas", "nvidia-cublas-cu12")
"""Beside those that a run records."""


def machine() -> dict[str, Any]:
    """Return date, processor, cores, GPU (or None) and versions."""
    gpu = torch.cuda.get_device_name() if has_gpu() else None
    installed = {package: _version(package) for package in PACKAGES}
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "versions": {**versions(), "cuda": torch.version.cuda, **installed},
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result with its machine as JSON; at once or not at all, so that it can be kept up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    partial.replace(path)


def has_gpu() -> bool:
    """Whether there is a GPU; torch.cuda may be redirected to the CPU and is not asked."""
    return bool(torch.version.cuda) and Path("/dev/nvidiactl").exists()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
