"""`megatron-snip stats`: what one refresh of a run measured, as a table or JSON.

Works on any run with refreshes, also on one that only measures (--snip-collect-only). With
`--precision`: what every linear of a run really ran.
"""

import argparse
import contextlib
import json
import math
import sys
from dataclasses import astuple, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_snip.cli.common import integer, new_table
from megatron_snip.errors import UsageError, did_you_mean
from megatron_snip.files import read_json
from megatron_snip.options import Option
from megatron_snip.output import console, csv_text
from megatron_snip.reporting.metrics_file import read_metrics
from megatron_snip.reporting.precision_record import (
    LinearPrecision,
    PrecisionRecord,
    read_precision,
)
from megatron_snip.reporting.run_record import (
    Divergences,
    check_run_directory,
    file_of_last_refresh,
    numbered_files,
    parse_divergences,
)
from megatron_snip.reporting.text import column, number
from megatron_snip.statistics.health_table import MEANINGS, Finding, HealthTable

COLUMNS = ("loss", "weight", "error", "noise")

EXAMPLES = (
    "megatron-snip stats runs/demo",
    "megatron-snip stats runs/demo --iteration 56 --sort weight",
    "megatron-snip stats runs/demo --health",
    "megatron-snip stats runs/demo --precision --iteration 30",
    "megatron-snip stats runs/demo --csv",
    "megatron-snip stats runs/demo --json | jq '.linears[0].statistics'",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run's directory")
    text = "iteration of the refresh; with --precision any iteration [the last]"
    add("--iteration", metavar="N", type=integer, help=text)
    text = (
        "order of the rows: model, or largest first by loss or weight (the divergences), error "
        "(the relative quantization error of the operands), noise (the gradient noise), or a "
        "statistic of a plugin [model]"
    )
    add("--sort", metavar="COLUMN", default="model", help=text)
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("--health", action="store_true", help="the worst linears by each measure of health")
    text = "what every linear ran: option, recipe, storage of the weight, and what fixed it"
    kind("--precision", action="store_true", help=text)
    form = parser.add_mutually_exclusive_group().add_argument
    text = "all values of each measure of health as CSV, worst first; or those of --precision"
    form("--csv", action="store_true", help=text)
    form("--json", action="store_true", help="print the file that is read, only")


def run(args: argparse.Namespace) -> int:
    """Print one refresh's statistics, or what linears ran; return 0.

    Raises:
        UsageError: if the run, the iteration or the file is missing or bad.
    """
    if args.sort != "model" and (args.health or args.precision or args.csv or args.json):
        raise UsageError(
            "--sort orders the table of divergences; --health, --precision, --csv and --json do not"
        )
    if args.precision:
        path = _precision_file(args.run, args.iteration)
        precision = read_precision(path)
        if args.json:
            print(json.dumps(read_json(path, "precision file"), indent=1))
        elif args.csv:
            names = [field.name for field in fields(LinearPrecision)]
            sys.stdout.write(csv_text([names, *map(astuple, precision.linears)]))
        else:
            _print_precision(precision)
        return 0
    kind = "health" if args.health or args.csv else "divergences"
    path = _find(args.run / kind, args.iteration)
    value = read_json(path, f"{kind} file")
    source = f"{kind} file '{path}'"
    read = HealthTable.from_dict if kind == "health" else parse_divergences
    record = read(value, source)
    if args.json:
        print(json.dumps(value, indent=1))
    elif isinstance(record, Divergences):
        _print_divergences(record, args.sort, _gradient_noise(args.run, record.iteration))
    elif args.csv:
        sys.stdout.write(csv_text([Finding._fields, *record.worst(None)]))
    else:
        _print_health(record)
    return 0


def _gradient_noise(run: Path, iteration: int) -> dict[tuple[str, str], float | None]:
    """Return the gradient noise by (linear, format); empty if the run has no such file of health.

    Raises:
        UsageError: if the file is bad.
    """
    path = run / "health" / f"{iteration}.json"
    if not path.exists():
        return {}
    health = HealthTable.from_dict(read_json(path, "health file"), f"health file '{path}'")
    return {
        (linear.name, name): value
        for linear in health.linears
        for name, value in linear.gradient_noise.items()
    }


def _print_divergences(
    record: Divergences, sort: str, noise: dict[tuple[str, str], float | None]
) -> None:
    formats = [found for linear in record.linears for found in linear.statistics.formats.values()]
    of_plugins = list(dict.fromkeys(name for found in formats for name in found.added))
    shown = (*COLUMNS, *of_plugins)
    if sort not in ("model", *shown):
        known = ", ".join(("model", *shown))
        raise UsageError(f"--sort: there is no column '{sort}'{did_you_mean(sort, shown)}; {known}")
    rows: list[tuple[str, str, dict[str, Any]]] = []
    for linear in record.linears:
        for option, measured in linear.options.items():
            found = linear.statistics.formats.get(option)
            added = {} if found is None else found.added
            values = {
                "loss": measured.get("loss_divergence"),
                "weight": measured.get("weight_divergence"),
                "error": measured.get("rel_error"),
                "noise": noise.get((linear.name, Option.parse(option).wgrad)),
                **{name: added.get(name) for name in of_plugins},
            }
            if option != "bf16":
                rows.append((linear.name, option, values))
    if sort != "model":
        rows.sort(key=lambda row: math.inf if row[2][sort] is None else -row[2][sort])
    table = new_table(("linear", "option"), shown)
    columns = {name: column([values[name] for _, _, values in rows]) for name in shown}
    for row, (name, option, _) in enumerate(rows):
        table.add_row(name, option, *(columns[each][row] for each in shown))
    out = console()
    out.print(f"iteration {record.iteration}, loss {number(record.loss)}")
    out.print(table)
    out.print(
        "loss, weight: loss and weight divergence, scores that order the linears. error: sum of "
        "the relative quantization errors of both operands of its three GEMMs. noise: sqrt(3) "
        "times the estimated error of wgrad over the gradient."
    )


def _print_health(health: HealthTable) -> None:
    out = console()
    out.print(f"iteration {health.iteration}: the worst by each measure (docs/glossary.md)")
    for measure, findings in groupby(health.worst(), key=lambda each: each.measure):
        out.print(f"{measure}: {MEANINGS[measure]}")
        table = new_table(("linear", "tensor", "format"), (measure,))
        worst = list(findings)
        values = column([each.value for each in worst])
        for each, value in zip(worst, values, strict=True):
            table.add_row(each.linear, each.tensor, each.format, value)
        out.print(table)


def _print_precision(record: PrecisionRecord) -> None:
    names = ("linear", "option", "recipe", "weight storage", "fixed by")
    table = new_table(names)
    for each in record.linears:
        ran = f"{each.backend}: {each.recipe}"
        table.add_row(each.name, each.option, ran, each.weight_storage, each.fixed or "")
    out = console()
    plan = f"plans/{record.plan_iteration}.json"
    out.print(f"from iteration {record.iteration} on, under {plan}")
    out.print(table)
    for line in (*record.summary(), *(f"no linear for {rule}" for rule in record.unused_rules)):
        out.print(line, soft_wrap=True)


def _precision_file(run: Path, iteration: int | None) -> Path:
    """Return the file of what a run's linears ran in an iteration, by default the last one."""
    check_run_directory(run)
    files = numbered_files(run / "precision")
    if not files:
        raise UsageError(
            f"'{run}' has no precision/<iteration>.json: until the first plan other than the job's "
            "own precision, linears run what the job runs"
        )
    known = [at for at in files if iteration is None or at <= iteration]
    if not known:
        raise UsageError(f"--iteration: the first plan of '{run}' ran at iteration {min(files)}")
    return files[max(known)]


def _find(folder: Path, iteration: int | None) -> Path:
    run = folder.parent
    check_run_directory(run)
    files = numbered_files(folder)
    if not files:
        raise UsageError(f"no statistics in '{run}': a refresh writes {folder}/<iteration>.json")
    if iteration is None:
        return _file_of_last_refresh(folder) or files[max(files)]
    if iteration not in files:
        known = ", ".join(map(str, list(files)[:20])) + (", ..." if len(files) > 20 else "")
        raise UsageError(f"--iteration: no refresh at {iteration} in '{run}'; there are {known}")
    return files[iteration]


def _file_of_last_refresh(folder: Path) -> Path | None:
    """Return the file of the run's last refresh; None if no iteration has ended with one."""
    with contextlib.suppress(UsageError):  # no iteration has ended
        return file_of_last_refresh(folder, read_metrics(folder.parent / "metrics.jsonl"))
    return None
