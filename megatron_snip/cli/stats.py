"""`megatron-snip stats`: what one refresh of a run measured, as a table and as a file.

Works on any run with refreshes, also on one that only collects (--snip-collect-only).
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from megatron_snip.cli.plan_tables import plain_console
from megatron_snip.errors import UsageError
from megatron_snip.files import read_json, write_atomic
from megatron_snip.reporting.divergence_record import divergence_record
from megatron_snip.reporting.report.words import printable

FIELDS = (
    "loss_divergence",
    "weight_divergence",
    "first",
    "fisher",
    "aligned_fisher",
    "local",
    "rel_error",
)
"""Columns after linear, stage and option; `local` is the root of local_square."""

EXAMPLES = """\
examples:
  megatron-snip stats runs/demo
  megatron-snip stats runs/demo --step 40 --sort weight_divergence --output fp4.csv
  megatron-snip stats runs/demo --step 40 --json | jq '.linears[0].statistics'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory")
    parser.add_argument("--step", type=int, help="the refresh's training step [the last]")
    parser.add_argument(
        "--sort", choices=("model", *FIELDS), default="model", help="order of the rows [model]"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="where the table is saved as CSV [statistics/<step>.csv in RUN]",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the divergences file itself, only; save nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Print and save one refresh's statistics; return 0.

    Raises:
        UsageError: if the run, the step or the file is missing or bad, or the output cannot be
            written.
    """
    path = find(args.run, args.step)
    value = read_json(path, "divergences file")
    record = divergence_record(value, f"divergences file '{path}'")
    if args.json:
        print(json.dumps(value, indent=1))
        return 0
    rows = table_rows(value)
    if args.sort != "model":
        rows.sort(key=lambda row: -_number(row[args.sort]))
    console = plain_console(200)
    console.print(_table(rows, record.step, value))
    output = args.output or args.run / "statistics" / f"{record.step}.csv"
    _save(output, to_csv(rows))
    console.print(f"saved as {output}")
    return 0


def find(run: Path, step: int | None) -> Path:
    """Return the divergences file of a step, or of the last refresh.

    Raises:
        UsageError: if there is none; names the steps that there are.
    """
    folder = run / "divergences"
    steps = sorted(int(p.stem) for p in folder.glob("*.json") if p.stem.isdecimal())
    if not steps:
        raise UsageError(f"no statistics in '{run}': expected {folder}/<step>.json of a refresh")
    if step is None:
        step = steps[-1]
    if step not in steps:
        known = ", ".join(map(str, steps[:20])) + (", ..." if len(steps) > 20 else "")
        raise UsageError(f"--step: no refresh at step {step} in '{run}'; there are {known}")
    return folder / f"{step}.json"


def table_rows(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row a linear and quantized option; None where a value is unknown."""
    rows = []
    for linear in value["linears"]:
        formats = linear.get("statistics", {}).get("formats", {})
        for option, measured in linear["options"].items():
            if option == "bf16":
                continue
            parts = formats.get(option, {})
            rows.append(
                {
                    "linear": linear["name"],
                    "stage": linear["stage"],
                    "option": option,
                    "loss_divergence": measured.get("loss_divergence"),
                    "weight_divergence": measured.get("weight_divergence"),
                    "first": parts.get("first"),
                    "fisher": parts.get("fisher"),
                    "aligned_fisher": parts.get("aligned_fisher"),
                    "local": _root(parts.get("local_square")),
                    "rel_error": measured.get("rel_error"),
                }
            )
    return rows


def to_csv(rows: list[dict[str, Any]]) -> str:
    """Return the rows as CSV with a header; what is unknown is empty."""
    stream = io.StringIO()
    names = ["linear", "stage", "option", *FIELDS]
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
    return stream.getvalue()


def _table(rows: list[dict[str, Any]], step: int, value: dict[str, Any]) -> Table:
    loss = value.get("loss")
    title = f"step {step}" + (f", loss {loss:.4f}" if isinstance(loss, float) else "")
    table = Table("linear", "option", title=title, title_justify="left", box=box.SIMPLE)
    for field in FIELDS:
        table.add_column(field.replace("_", " "), justify="right")
    for row in rows:
        names = printable(row["linear"]), printable(row["option"])
        table.add_row(*names, *(_shown(row[field]) for field in FIELDS))
    return table


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _root(square: float | None) -> float | None:
    return None if square is None or square < 0 else square**0.5


def _number(value: float | None) -> float:
    return float("-inf") if value is None else float(value)


def _save(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise UsageError(f"cannot write '{path}': {error}") from None
