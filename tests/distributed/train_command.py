"""`megatron-snip train` as a test starts it: a tiny model on two tensor-parallel ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.distributed.launch import ROOT, TIMEOUT_S
from tests.distributed.layouts import TP2

TINY = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 16,
    "global_batch_size": 8,
    "train_iters": 3,
    "lr_warmup_iters": 0,
    "eval_interval": 2,
    "eval_iters": 1,
    "max_corpus_bytes": 200_000,
    "bf16": False,
}


def command(run_dir: Path, **values: Any) -> list[str]:
    """`megatron-snip train` with a tiny model on two tensor-parallel ranks."""
    settings = {**TINY, **TP2, "bf16": True, **values, "run_dir": str(run_dir)}
    file = run_dir.parent / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    return [sys.executable, "-m", "megatron_snip", "train", "--config", str(file)]


def environment(folder: Path, **extra: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK")}
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {**plain, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache"), **extra}


def run_command(
    words: list[str], folder: Path, cwd: Path | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        words,
        cwd=cwd,
        env=environment(folder, PYTHONWARNINGS="ignore", **extra),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows that count: a later one of an iteration replaces those from there on."""
    rows: list[dict[str, Any]] = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows = [each for each in rows if each["iteration"] < row["iteration"]]
        rows.append(row)
    return rows
