"""Damage to a checkpoint's folder; each function returns the name of the file that it damaged."""

import os
from pathlib import Path

import torch


def truncate(path: Path) -> str:
    file = next(path.glob("*.distcp"))
    os.truncate(file, 100)
    return file.name


def empty_metadata(path: Path) -> str:
    os.truncate(path / ".metadata", 0)
    return ".metadata"


def flip_a_bit(path: Path) -> str:
    file = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file.name


def without_scheduler(path: Path) -> str:
    file = path / "common.pt"
    common = torch.load(file)
    del common["opt_param_scheduler"]
    torch.save(common, file)
    return file.name
