"""W&B without a network: a sandbox for its files, and reading back what it wrote."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


def isolate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep W&B within `folder`, offline."""
    values = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CACHE_DIR": folder / "cache",
        "WANDB_DATA_DIR": folder / "data",
        "WANDB_CONFIG_DIR": folder / "config",
        "WANDB_X_DISABLE_STATS": "true",
        "WANDB_CONSOLE": "off",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


@dataclass
class Written:
    """A W&B run's file as read back.

    Attributes:
        rows: {step: {key: value}} of its history; media by their flat keys.
        config: as shown.
        alerts: (title, text).
        artifacts: (name, type).
        exit_code: None where the run was not finished.
        files: folder of media.
    """

    files: Path
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    artifacts: list[tuple[str, str]] = field(default_factory=list)
    exit_code: int | None = None

    def steps_with(self, key: str) -> list[int]:
        return [step for step, row in self.rows.items() if key in row or f"{key}._type" in row]

    def media(self, key: str, step: int) -> Path:
        row = self.rows[step]
        return self.files / (row[f"{key}.path"] if f"{key}.path" in row else row[key]["path"])


def read_back(folder: Path) -> Written:
    """Read the one run below `folder` with W&B's own tool."""
    (log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    written = Written(log.parent / "files")
    for record in map(json.loads, inspect(log, "--json").splitlines()):
        if record["type"] == "history":
            item = record["history"]["item"]
            written.rows.setdefault(int(item["_step"]), {}).update(item)
        elif record["type"] == "alert":
            written.alerts.append((record["alert"]["title"], record["alert"]["text"]))
        elif record["type"] == "artifact":
            written.artifacts.append((record["artifact"]["name"], record["artifact"]["type"]))
        elif record["type"] == "exit":
            written.exit_code = int(record["exit"].get("exit_code", 0))
    written.config = json.loads(inspect(log, "--summary", "--json"))["config"]
    return written


def inspect(log: Path, *flags: str) -> str:
    tool = Path(sys.executable).with_name("wandb")
    return subprocess.run(
        [str(tool), "leet", "inspect", *flags, str(log)],
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    ).stdout
