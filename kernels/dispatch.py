"""Which path quantizes a tensor, and why: Triton kernels on CUDA, the PyTorch reference elsewhere.

One place decides, and every public function of `quantizers` asks it. The two paths agree bit for
bit, so the choice is one of speed alone. Triton itself is imported only when its path is taken.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.log import warn_once

_LOGGER = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which the kernels run: BF16 arithmetic."""

LEAST_PAYLOAD_CAPABILITY = (8, 9)
"""Compute capability from which E4M3 payloads can be written: the FP8 cast."""

LARGEST_TILE = 128 * 128
"""Elements of the largest tile a kernel holds in registers."""


class Path(StrEnum):
    """Who does the work."""

    TRITON = "triton"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Choice:
    """The path taken and the reason, in words a user can act on."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


_forced: list[Path] = []


@contextmanager
def forced(path: Path) -> Iterator[None]:
    """Take one path inside the `with`, for tests and benchmarks.

    Forcing Triton where it cannot run raises `UnsupportedError` at the first use.
    """
    _forced.append(path)
    try:
        yield
    finally:
        _forced.pop()


def choose(device: torch.device, block: tuple[int, int], *, payload: bool = False) -> Choice:
    """Decide for a tensor on `device` under tiles of `block`.

    A CUDA tensor that has to take the reference path is warned about once.

    Args:
        device: the tensor's.
        block: (rows, cols) of a tile.
        payload: whether E4M3 bytes are asked for.

    Raises:
        UnsupportedError: if Triton is forced and cannot run; the message says why.
    """
    obstacle = _obstacle(device, payload) or _tile_obstacle(block)
    if _forced and _forced[-1] is Path.REFERENCE:
        return Choice(Path.REFERENCE, "asked for")
    if _forced:
        if obstacle:
            raise UnsupportedError(f"Triton kernels were asked for but cannot run: {obstacle}")
        return Choice(Path.TRITON, "asked for")
    if device.type != "cuda":
        return Choice(Path.REFERENCE, f"the tensor is on {device.type}, not cuda")
    if obstacle:
        warn_once(_LOGGER, f"quantizing on {device.type} without Triton, slowly: {obstacle}")
        return Choice(Path.REFERENCE, obstacle)
    return Choice(Path.TRITON, "the tensor is on cuda")


def explain() -> Choice:
    """The choice for this machine's default device under fp8's tiles, for `doctor`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return choose(device, (1, 128))


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")


@lru_cache(maxsize=1)
def triton_found() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _obstacle(device: torch.device, payload: bool) -> str:
    """Why kernels cannot run on `device`, or an empty string."""
    if not triton_found():
        return "triton is not installed (pip install triton)"
    if device.type == "cpu":
        return "" if interpreting() else "the tensor is on cpu and TRITON_INTERPRET is not set"
    if device.type != "cuda":
        return f"no kernels for {device.type}"
    least = LEAST_PAYLOAD_CAPABILITY if payload else LEAST_CAPABILITY
    capability = _capability(device)
    if capability < least:
        what = "FP8 payloads need" if payload else "kernels need"
        return (
            f"{what} compute capability {least[0]}.{least[1]}, this GPU has "
            f"{capability[0]}.{capability[1]}"
        )
    return ""


@lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _tile_obstacle(block: tuple[int, int]) -> str:
    if any(side < 1 or side & (side - 1) for side in block):
        return f"tile sides must be powers of two, got {block[0]}x{block[1]}"
    if block[0] * block[1] > LARGEST_TILE:
        return f"a {block[0]}x{block[1]} tile exceeds {LARGEST_TILE} elements"
    return ""
