"""Where a result comes from: the day, the machine, the versions, the commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from megatron_snip.reporting.run_directory import versions


def machine() -> dict[str, Any]:
    """Return date, processor, cores, GPU (or None) and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": _gpu_name() if has_gpu() else None,
        "versions": {**versions(), "cuda": torch.version.cuda},
    }


def commit() -> str | None:
    """Return the commit of the checkout that this package belongs to, `-dirty` if it differs.

    None where it is installed, also where that is inside of another project's checkout.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")


def has_gpu() -> bool:
    """Whether there is a GPU; torch.cuda may be redirected to the CPU and is not asked."""
    return bool(torch.version.cuda) and Path("/dev/nvidiactl").exists()


def _git(*words: str) -> str | None:
    """Return what git says of this file's directory, or None."""
    place = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", *words], cwd=place, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


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
