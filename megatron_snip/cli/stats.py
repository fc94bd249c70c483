"""`megatron-snip stats`: what one refresh of a run measured, as a table or JSON.

Works on any run with refreshes, also on one that only measures (--snip-collect-only).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_snip.cli.common import add_examples, console, integer, new_table
from megatron_snip.errors import UsageError, shown
from megatron_snip.files import read_json
from megatron_snip.reporting.run_record import numbered_files, parse_divergences
from megatron_snip.reporting.text import column, number
from megatron_snip.statistics.health_table import FINDING_COLUMNS, MEANINGS, HealthTable

COLUMNS = {
    "loss": "loss_divergence",
    "weight": "weight_divergence",
    "local": "local_square",
    "error": "rel_error",
}
"""Columns of the table, and where the file has them; `local` is the root of `local_square`."""

HEADS = (
    "loss, weight: loss and weight divergence, scores that order the linears. local: relative "
    "change of the linear's next update. error: relative quantization error."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_examples(
        parser,
        "megatron-snip stats runs/demo",
        "megatron-snip stats runs/demo --iteration 56 --sort weight",
        "megatron-snip stats runs/demo --health",
        "megatron-snip stats runs/demo --csv",
        "megatron-snip stats runs/demo --json | jq '.linears[0].statistics'",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory")
    parser.add_argument(
        "--iteration", metavar="N", type=integer, help="iteration of the refresh [the last]"
    )
    parser.add_argument(
        "--sort", choices=("model", *COLUMNS), default="model", help="order of the rows [model]"
    )
    parser.add_argument(
        "--health", action="store_true", help="the worst linears by each measure of health"
    )
    parser.add_argument(
        "--csv", action="store_true", help="every value of health as CSV, worst first"
    )
    parser.add_argument("--json", action="store_true", help="print the file that is read, only")


def run(args: argparse.Namespace) -> int:
    """Print one refresh's statistics; return 0.

    Raises:
        UsageError: if the run, the iteration or the file is missing or bad.
    """
    kind = "health" if args.health or args.csv else "divergences"
    path = _find(args.run / kind, args.iteration)
    value = read_json(path, f"{kind} file")
    source = f"{kind} file '{path}'"
    is_health = kind == "health"
    record = (HealthTable.from_dict if is_health else parse_divergences)(value, source)
    if args.json:
        print(json.dumps(value, indent=1))
        return 0
    if isinstance(record, HealthTable) and args.csv:
        csv.writer(sys.stdout).writerows([FINDING_COLUMNS, *record.worst(None)])
        return 0
    if isinstance(record, HealthTable):
        _print_health(record)
        return 0
    try:
        rows = _rows(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{source} is damaged ({type(error).__name__}: {error})") from None
    if args.sort != "model":
        rows.sort(key=lambda row: math.inf if row[args.sort] is None else -row[args.sort])
    out, loss = console(), value.get("loss")
    out.print(f"iteration {record.iteration}, loss {number(loss)}")
    out.print(_table(rows))
    out.print(HEADS)
    return 0


def _print_health(health: HealthTable) -> None:
    out = console()
    out.print(f"iteration {health.iteration}: the worst by each measure (docs/glossary.md)")
    for measure, rows in groupby(health.worst(), key=lambda row: row[0]):
        out.print(f"{measure}: {MEANINGS[measure]}")
        table = new_table(("linear", "tensor", "format"), (measure,))
        worst = list(rows)
        values = column([value for *_, value in worst])
        for (_, *texts, _), value in zip(worst, values, strict=True):
            table.add_row(*map(shown, texts), value)
        out.print(table)


def _find(folder: Path, iteration: int | None) -> Path:
    run = folder.parent
    files = numbered_files(folder)
    if not files:
        raise UsageError(f"no statistics in '{run}': a refresh writes {folder}/<iteration>.json")
    if iteration is None:
        return files[max(files)]
    if iteration not in files:
        known = ", ".join(map(str, list(files)[:20])) + (", ..." if len(files) > 20 else "")
        raise UsageError(f"--iteration: no refresh at {iteration} in '{run}'; there are {known}")
    return files[iteration]


def _rows(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per linear and quantized option; None where a value is unknown."""
    rows = []
    for linear in value["linears"]:
        formats = linear.get("statistics", {}).get("formats", {})
        for option, measured in linear["options"].items():
            if option == "bf16":
                continue
            found = {**measured, **formats.get(option, {})}
            values = {name: found.get(key) for name, key in COLUMNS.items()}
            row = {name: None if v is None else float(v) for name, v in values.items()}
            square = row["local"]
            row["local"] = None if square is None or square < 0 else math.sqrt(square)
            rows.append({"linear": linear["name"], "option": option, **row})
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = new_table(("linear", "option"), tuple(COLUMNS))
    columns = [column([row[name] for row in rows]) for name in COLUMNS]
    for row, *numbers in zip(rows, *columns, strict=True):
        table.add_row(shown(row["linear"]), shown(row["option"]), *numbers)
    return table
