"""All benchmarks of one machine, in slices: `make bench-gpu`.

    python -m benchmarks.gpu [--output FILE] [--minutes 12] [--only NAMES] [--again]

A call is one slice of at most `--minutes`. It runs the parts that have no result of this commit
yet, the most wanted first, each in a process of its own with a limit of time; call it again until
it says that nothing is left. The parts of FIRST are what is least known; all of them fit into the
first 12 minutes. What was measured (of a part that fails or runs out of time, what it
had measured until then) goes at once to benchmarks/results/<gpu>.json (<cpu>.json without a GPU,
from smaller work):

    {"machine": {date, cpu, cores, gpu, versions: {..}},
     "<part>": {.. what the part measured ..,
                "goals": [{name, value, least?, most?, met}],    where it has goals
                "failures": {name: why},                         of what is within the part
                "failed": why,                                   of the part itself
                "unfinished": true,                              the next slice goes on with it
                "commit": "..", "wall_seconds": s}}

Exit status: 0 if nothing is left, 1 if a part failed, 3 if there is more for the next slice.
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

from benchmarks.machine import RESULTS, has_gpu, machine, read_rows
from megatron_snip.errors import UsageError

LIMIT = "SNIP_BENCH_SECONDS"
"""Environment variable: the seconds after which a part that can go on later should stop."""


@dataclass(frozen=True)
class Part:
    """One benchmark.

    Attributes:
        name: what the report calls it.
        flag: what takes the file to write.
        limit_s: seconds it may take.
        arguments: on a GPU.
        cpu_arguments: without one.
        module: under benchmarks/; empty if it has the part's name.
    """

    name: str
    flag: str
    limit_s: float
    arguments: tuple[str, ...] = ()
    cpu_arguments: tuple[str, ...] = ()
    module: str = ""


_SHORT = ("--iterations", "18")
FIRST = (
    Part("bits", "--json", 90.0, ("bits",), ("bits",), "suites"),
    Part("measured", "--json", 90.0, ("--only", "bf16, measured"), _SHORT, "job"),
    Part("refresh", "--output", 70.0, ("--rounds", "9"), ("--rounds", "3")),
    Part("fp8", "--json", 110.0, ("fp8",), ("fp8",), "layers"),
    Part("gemms", "--json", 70.0, ("gemms",), ("gemms",), "layers"),
    Part("columns", "--json", 70.0, cpu_arguments=("--static",)),
    Part("inspect", "--json", 80.0, ("inspect",), ("inspect",), "layers"),
    Part(
        "memory",
        "--json",
        110.0,
        ("--only", "fp8 tensorwise, off,fp8 tensorwise, half"),
        _SHORT,
        "job",
    ),
)
"""Each within two minutes, 12 minutes in all, in the order of what is least known."""

LATER = (
    Part("device", "--json", 120.0),
    Part("te", "--json", 240.0, ("te",), ("te",), "suites"),
    Part("job", "--json", 300.0, cpu_arguments=_SHORT),
    Part("linear", "--json", 150.0),
    Part("step", "--json", 150.0),
    Part("kernels", "--json", 120.0, cpu_arguments=("--static",)),
    Part("switch", "--json", 75.0, ("--rounds", "5"), ("--rounds", "2")),
    Part("curves", "--json", 470.0),
)

PARTS = (*FIRST, *LATER)
"""In the order of what is most wanted."""


def command(part: Part, file: Path, gpu: bool) -> list[str]:
    """Return how a part is run."""
    arguments = part.arguments if gpu else part.cpu_arguments
    module = part.module or part.name
    return [sys.executable, "-m", f"benchmarks.{module}", *arguments, part.flag, str(file)]


def run_part(part: Part, folder: Path, seconds_left: float, gpu: bool) -> dict[str, Any]:
    """Return what a part measured, or {"failed": why}; its own output goes to the terminal."""
    limit = min(part.limit_s, seconds_left)
    file = folder / f"{part.name}.json"
    begin = time.monotonic()
    failed = ""
    try:
        status = subprocess.run(
            command(part, file, gpu),
            timeout=limit,
            env={**os.environ, "PYTHONWARNINGS": "ignore", LIMIT: f"{limit - 30:.0f}"},
            check=False,
        ).returncode
        failed = f"exit status {status}" if status else ""
    except subprocess.TimeoutExpired:
        failed = f"not done after {limit:.0f} s"
    found: dict[str, Any] = {}
    if file.exists() and part.name == "refresh":  # it writes rows, the other parts one JSON object
        found = (read_rows(file) or [{}])[-1]
    elif file.exists():
        found = json.loads(file.read_text())
    if not (failed or file.exists()):
        failed = "it wrote nothing"
    found.pop("machine", None)
    found["wall_seconds"] = time.monotonic() - begin
    if failed:
        found["failed"] = failed
    return found


def next_part(parts: Sequence[Part], report: dict[str, Any], commit: str) -> Part | None:
    """Return the first part without a result of this commit; then those that are unfinished."""
    for part in parts:
        if report.get(part.name, {}).get("commit") != commit:
            return part
    return next((part for part in parts if report[part.name].get("unfinished")), None)


def file_name(found: dict[str, Any]) -> str:
    """Return a file's name for a machine: nvidia-h200.json, amd-epyc.json."""
    name = found["gpu"] or found["cpu"]
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a slice, write one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--output", type=Path, metavar="FILE", help="[results/<machine>.json]")
    parser.add_argument("--minutes", type=float, default=12.0, help="of this slice")
    parser.add_argument("--only", help="names of parts, comma separated")
    parser.add_argument("--again", action="store_true", help="measure what has a result as well")
    args = parser.parse_args(argv)
    console, here, gpu = Console(), machine(), has_gpu()
    output = args.output or RESULTS / file_name(here)
    wanted, commit = chosen(args.only), here["commit"]
    report = {**(json.loads(output.read_text()) if output.exists() else {}), "machine": here}
    for part in wanted if args.again else ():
        report.pop(part.name, None)
    end = time.monotonic() + 60.0 * args.minutes
    console.print(f"{here['gpu'] or here['cpu']}, torch {here['versions']['torch']} -> {output}")
    while part := next_part(wanted, report, commit):
        left = end - time.monotonic()
        if left < min(part.limit_s, 60.0 * args.minutes - 10.0):
            break
        console.rule(f"{part.name}: at most {min(part.limit_s, left):.0f} s")
        with tempfile.TemporaryDirectory() as folder:
            report[part.name] = {**run_part(part, Path(folder), left, gpu), "commit": commit}
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_name(output.name + ".part")
        partial.write_text(json.dumps(report, indent=1) + "\n")
        partial.replace(output)
    for part in wanted:
        result = report.get(part.name, {})
        done = "unfinished" if result.get("unfinished") else "done" if result else "to do"
        why = f"[red]{result['failed']}[/]" if "failed" in result else result.get("skipped", done)
        console.print(f"{part.name:8} {result.get('wall_seconds', 0.0):4.0f} s  {why}")
        _show_goals(result, console)
    console.print(f"written to {output}")
    if part := next_part(wanted, report, commit):
        console.print(f"left for the next slice, from {part.name} on: call this again")
        return 3
    return int(any("failed" in report[part.name] for part in wanted))


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
