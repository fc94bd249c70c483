"""What the nightly programs share: a flag for the file of their result, and that file."""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

from megatron_snip.files import write_atomic


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--output", type=Path, default=None)
    return made


def save(path: Path | None, ranks: str, values: dict[str, Any]) -> str:
    """Write a result where a path is given; return its text."""
    machine = f"{platform.machine()}, {ranks}"
    result = {"version": 1, "machine": machine, "torch": torch.__version__, **values}
    text = json.dumps(result, indent=1)
    if path is not None:
        write_atomic(path, text + "\n")
    return text
