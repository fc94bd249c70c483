"""All benchmarks of one machine in one go: `make bench-gpu`.

    python -m benchmarks.gpu [--output FILE] [--minutes 9.5]

Runs, one process each so that a failure stays its own: kernels, linear, step, switch, refresh.
Each has a limit of time; together they end within `--minutes`. What was measured, what failed and
why goes to benchmarks/results/<gpu>.json (<cpu>.json without a GPU, from smaller work), from which
`python -m benchmarks.tables` makes the README's tables. Exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import RESULTS, has_gpu, machine


@dataclass(frozen=True)
class Part:
    """One benchmark.

    Attributes:
        name: its module under benchmarks/.
        flag: what takes the file to write.
        limit_s: seconds it may take.
        arguments: on a GPU.
        cpu_arguments: without one.
    """

    name: str
    flag: str
    limit_s: float
    arguments: tuple[str, ...] = ()
    cpu_arguments: tuple[str, ...] = ()


PARTS = (
    Part("linear", "--json", 150.0),
    Part("kernels", "--json", 120.0, cpu_arguments=("--cpu",)),
    Part("step", "--json", 150.0),
    Part("switch", "--json", 90.0, ("--rounds", "5"), ("--rounds", "2")),
    Part("refresh", "--output", 90.0, (), ("--steps", "3")),
)
"""In the order of what is most wanted, should the time run out."""


def command(part: Part, file: Path, gpu: bool) -> list[str]:
    """Return how a part is run."""
    arguments = part.arguments if gpu else part.cpu_arguments
    return [sys.executable, "-m", f"benchmarks.{part.name}", *arguments, part.flag, str(file)]


def run_part(part: Part, folder: Path, seconds_left: float, gpu: bool) -> dict[str, Any]:
    """Return what a part measured, or {"failed": why}; its own output goes to the terminal."""
    limit = min(part.limit_s, seconds_left)
    if limit <= 0:
        return {"failed": "no time was left"}
    file = folder / f"{part.name}.json"
    begin = time.monotonic()
    try:
        status = subprocess.run(
            command(part, file, gpu),
            timeout=limit,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit:.0f} s"}
    if not file.exists():
        return {"failed": f"exit status {status}"}
    found: dict[str, Any] = json.loads(file.read_text())
    found.pop("machine", None)
    found["wall_seconds"] = time.monotonic() - begin
    if status != 0:
        found["failed"] = f"exit status {status}"
    return found


def file_name(found: dict[str, Any]) -> str:
    """Return a file's name for a machine: nvidia-h200.json, amd-epyc.json."""
    name = found["gpu"] or found["cpu"]
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, metavar="FILE", help="[results/<machine>.json]")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything together")
    parser.add_argument("--only", help="names of parts, comma separated")
    args = parser.parse_args(argv)
    console, here, gpu = Console(), machine(), has_gpu()
    output = args.output or RESULTS / file_name(here)
    wanted = args.only.split(",") if args.only else [part.name for part in PARTS]
    report: dict[str, Any] = {"machine": here}
    end = time.monotonic() + 60.0 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        for part in (p for p in PARTS if p.name in wanted):
            console.rule(part.name)
            report[part.name] = run_part(part, Path(folder), end - time.monotonic(), gpu)
            output.parent.mkdir(parents=True, exist_ok=True)  # kept, whatever comes after
            output.write_text(json.dumps(report, indent=1) + "\n")
    failed = {n: r["failed"] for n, r in report.items() if "failed" in r}
    for name, why in failed.items():
        console.print(f"[red]{name} failed:[/] {why}")
    console.print(f"written to {output}; README tables: python -m benchmarks.tables")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
