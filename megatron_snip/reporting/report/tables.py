"""The report's numbers: tiles at the top, and tables that give what the pictures cannot.

Everything is text here, as the page shows it; the page escapes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_snip.options import Option
from megatron_snip.reporting.divergence_record import LinearRow
from megatron_snip.reporting.phases import phases_of
from megatron_snip.reporting.report.words import number, percent, seconds
from megatron_snip.reporting.run_record import RunRecord

MAX_LINEARS = 1000
"""Rows of the table of linears; larger models are in divergences/<step>.json."""


@dataclass(frozen=True)
class Tile:
    """One number at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Cells of text.

    Attributes:
        title: a few words.
        columns: headings.
        rows: one cell a column each.
        text_columns: how many columns, from the left, hold words; the others hold numbers.
        note: a sentence below it.
        folded: whether it is shown when asked for only.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    note: str = ""
    folded: bool = True


def tiles(run: RunRecord) -> tuple[Tile, ...]:
    """Return a run's most wanted numbers."""
    metrics, target = run.metrics, run.target
    share = metrics.last("lowest_precision_fraction")
    phases = phases_of(run)
    found = [
        Tile("training loss", number(metrics.last("loss")), f"at step {metrics.last_step}"),
        Tile("validation loss", number(metrics.last("validation_loss")), _validated_at(run)),
        Tile(
            f"linear FLOPs in {run.lowest_formats}",
            percent(share),
            "" if target is None else f"target {percent(target)}",
        ),
        Tile("plans applied", str(len(run.plans)), _last_change(run)),
    ]
    if phases is not None:
        measured = percent(phases.refresh / phases.wall)
        found.append(Tile("time measuring", measured, f"of {seconds(phases.wall)}"))
        found.append(Tile("time waiting", seconds(phases.wait), "for the solver"))
    return tuple(found)


def summary(runs: Sequence[RunRecord]) -> Table:
    """Return one row a run, to compare."""
    columns = (
        "run",
        "steps",
        "loss",
        "validation",
        "low precision",
        "target",
        "plans",
        "wall time",
    )
    rows = []
    for run in runs:
        phases = phases_of(run)
        rows.append(
            (
                run.name,
                progress(run),
                number(run.metrics.last("loss")),
                number(run.metrics.last("validation_loss")),
                percent(run.metrics.last("lowest_precision_fraction")),
                percent(run.target),
                str(len(run.plans)),
                seconds(None if phases is None else phases.wall),
                percent(None if phases is None else phases.refresh / phases.wall),
            )
        )
    return Table("The runs compared", (*columns, "measuring"), tuple(rows), folded=False)


def progress(run: RunRecord) -> str:
    """Return the steps made, and how many are planned."""
    planned = run.planned_steps
    return str(run.num_steps) if planned is None else f"{run.num_steps} of {planned}"


def plans_table(run: RunRecord) -> Table | None:
    """Return one row a plan applied, or None."""
    waits = {mark.step: mark.wait_s for mark in run.metrics.plans}
    rows = [
        (
            str(span.start),
            str(span.plan.iteration),
            span.plan.policy,
            span.plan.status,
            percent(span.plan.efficiency),
            number(span.plan.objective),
            number(span.plan.gap, 2),
            f"{span.changed} of {len(span.linears)}",
            seconds(span.plan.seconds),
            seconds(waits[span.start]),
        )
        for span in run.plans
        if span.plan is not None
    ]
    columns: tuple[str, ...]
    columns = ("applied", "measured", "policy", "status", "efficiency", "quality loss", "gap")
    columns = (*columns, "changed", "solved in", "waited")
    return Table("Every plan", columns, tuple(rows), text_columns=0) if rows else None


def linears_table(run: RunRecord) -> Table | None:
    """Return one row a linear: its share of FLOPs, divergences by option, and its option now."""
    record = run.divergences
    if record is None:
        return None
    options = record.uniform_options
    total = sum(row.flops for row in record.linears) or 1.0
    columns = ["linear", "now", "stage", "FLOPs"]
    columns += [f"{kind} {option}" for kind in ("loss", "weight") for option in options]
    chosen: dict[str, Option] = {} if run.plan is None else run.plan.linears
    rows = tuple(
        (
            row.name,
            str(chosen.get(row.name, "-")),
            str(row.stage),
            percent(row.flops / total),
            *_measures(row, options),
        )
        for row in record.linears[:MAX_LINEARS]
    )
    more = len(record.linears) - len(rows)
    note = f"{more} more are in divergences/{record.step}.json." if more else ""
    title = f"Every linear, as measured at step {record.step}"
    return Table(title, tuple(columns), rows, text_columns=2, note=note)


def events_table(run: RunRecord) -> Table | None:
    """Return one row an event, or None."""
    rows = tuple((str(e.step), e.kind, e.message) for e in run.metrics.events)
    columns = ("step", "kind", "what happened")
    return Table("Events", columns, rows, text_columns=3, folded=False) if rows else None


def settings_table(runs: Sequence[RunRecord], only_differences: bool) -> Table | None:
    """Return the settings, one column a run.

    Args:
        runs: at least one.
        only_differences: leave out what all runs have in common.
    """
    flat = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = []
    for key in keys:
        cells = tuple(values.get(key, "-") for values in flat)
        differ = len(set(cells)) > 1 and key != "run_dir"
        if differ or not only_differences:
            rows.append((key, *cells))
    if not rows:
        return None
    columns = ("setting", *(run.name for run in runs))
    title = "Settings that differ" if only_differences else "All settings"
    return Table(title, columns, tuple(rows), len(columns), folded=not only_differences)


def versions_table(runs: Sequence[RunRecord]) -> Table:
    """Return the versions of what decides numbers, one column a run."""
    packages = dict.fromkeys(package for run in runs for package in run.versions)
    rows = tuple((p, *(run.versions.get(p) or "-" for run in runs)) for p in packages)
    columns = ("package", *(run.name for run in runs))
    return Table("Versions", columns, rows, len(columns))


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as {dotted key: text}, in their order."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, list):
            flat[name] = ", ".join(map(str, value))
        else:
            flat[name] = "none" if value is None else str(value)
    return flat


def _measures(row: LinearRow, options: tuple[str, ...]) -> tuple[str, ...]:
    kinds = ("loss_divergence", "weight_divergence")
    return tuple(number(row.options.get(o, {}).get(k), 3) for k in kinds for o in options)


def _validated_at(run: RunRecord) -> str:
    steps, _ = run.metrics.column("validation_loss")
    return f"at step {steps[-1]}" if steps.size else "none measured"


def _last_change(run: RunRecord) -> str:
    if not run.plans:
        return ""
    last = run.plans[-1]
    return f"the last changed {last.changed} of {len(last.linears)} linears"
