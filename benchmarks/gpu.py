"""All benchmarks of one machine in one go: `make bench-gpu`.

    python -m benchmarks.gpu [--output FILE] [--minutes 9.5] [--only NAMES]

Runs, one process each so that a failure stays its own: device, linear, kernels, step, switch,
refresh. Each has a limit of time, printed before it begins; together they end within `--minutes`.
What was measured (of a part that fails or runs out of time, what it had measured until then) goes
to benchmarks/results/<gpu>.json (<cpu>.json without a GPU, from smaller work):

    {"machine": {date, cpu, cores, gpu, versions: {..}},
     "<part>": {.. what the part measured ..,
                "goals": [{name, value, least?, most?, met}],    where it has goals
                "failures": {name: why},                         of what is within the part
                "failed": why,                                   of the part itself
                "wall_seconds": s}}

With `--only`, the file's other parts stay as they are. Exit status 1 if anything failed.
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
from megatron_snip.errors import UsageError


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
    Part("device", "--json", 90.0),
    Part("linear", "--json", 120.0),
    Part("kernels", "--json", 120.0, cpu_arguments=("--cpu",)),
    Part("step", "--json", 120.0),
    Part("switch", "--json", 75.0, ("--rounds", "5"), ("--rounds", "2")),
    Part("refresh", "--output", 75.0, (), ("--rounds", "3")),
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
    failed = ""
    try:
        status = subprocess.run(
            command(part, file, gpu),
            timeout=limit,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            check=False,
        ).returncode
        failed = f"exit status {status}" if status else ""
    except subprocess.TimeoutExpired:
        failed = f"not done after {limit:.0f} s"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if not (failed or file.exists()):
        failed = "it wrote nothing"
    found.pop("machine", None)
    found["wall_seconds"] = time.monotonic() - begin
    if failed:
        found["failed"] = failed
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
    wanted = chosen(args.only)
    report = {**(_kept(output) if args.only else {}), "machine": here}
    end = time.monotonic() + 60.0 * args.minutes
    console.print(f"{here['gpu'] or here['cpu']}, torch {here['versions']['torch']} -> {output}")
    with tempfile.TemporaryDirectory() as folder:
        for part in wanted:
            left = end - time.monotonic()
            console.rule(f"{part.name}: at most {part.limit_s:.0f} s, {left:.0f} s are left")
            report[part.name] = run_part(part, Path(folder), left, gpu)
            output.parent.mkdir(parents=True, exist_ok=True)  # kept, whatever comes after
            output.write_text(json.dumps(report, indent=1) + "\n")
    failed = {p.name: report[p.name]["failed"] for p in wanted if "failed" in report[p.name]}
    for part in wanted:
        seconds = report[part.name].get("wall_seconds", 0.0)
        why = f"[red]{failed[part.name]}[/]" if part.name in failed else "done"
        console.print(f"{part.name:8} {seconds:4.0f} s  {why}")
        _show_goals(report[part.name], console)
    console.print(f"written to {output}")
    return 1 if failed else 0


def chosen(names: str | None) -> list[Part]:
    """Return the parts named, comma separated, in their own order; all of them by default.

    Raises:
        UsageError: if there is no such part.
    """
    known = [part.name for part in PARTS]
    wanted = names.split(",") if names else known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"no part is called '{unknown[0]}'; known: {', '.join(known)}")
    return [part for part in PARTS if part.name in wanted]


def _kept(output: Path) -> dict[str, Any]:
    """What an earlier run of other parts wrote."""
    found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    return found


def _show_goals(result: dict[str, Any], console: Console) -> None:
    """Print the goals that a part missed."""
    for goal in result.get("goals", []):
        if not goal["met"]:
            bound = f">= {goal['least']}" if goal.get("least") else f"<= {goal.get('most')}"
            console.print(f"         missed: {goal['name']} {goal['value']:.3f} ({bound})")


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UsageError as error:
        raise SystemExit(f"benchmarks.gpu: {error}") from None
