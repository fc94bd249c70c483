"""The report of one run, or of several compared, as one HTML file.

The file needs no network and runs no script; its Content-Security-Policy forbids both. The template
escapes all text, since names and settings come from files.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from megatron_snip.errors import SnipError, UsageError
from megatron_snip.planning.pareto import frontier
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.reporting import figures
from megatron_snip.reporting.figures import DIVERGENCE_TITLES, loss_gap, quantized_options
from megatron_snip.reporting.run_record import (
    MetricRows,
    RunRecord,
    read_metrics,
    read_run,
)
from megatron_snip.reporting.text import listing, number, option_counts, percent, quality, seconds
from megatron_snip.version import __version__

TEMPLATE = "report.html.j2"
FAILURES = {
    "kept": "refresh failed, plan kept",
    "guard": "guard: bad loss",
    "reverted": "plan reverted",
}
"""Kinds of notices, as the table of failures names them."""

MAX_LINEARS = 1000  # rows of the table of linears; the file has all
TARGETS = tuple(k / 20 for k in range(21))
TIME_LIMIT_S = 2.0  # per target of the frontier

Tile = tuple[str, str, str]
"""Label, value and note of a large number at the top."""


@dataclass(frozen=True)
class Table:
    """Cells of text.

    Attributes:
        title: a few words.
        columns: headings.
        rows: one cell per column.
        text_columns: how many columns, from the left, are left-aligned; numbers follow.
        note: a sentence below the table.
        folded: whether the table is shown only on demand.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    note: str = ""
    folded: bool = True


@dataclass(frozen=True)
class Picture:
    """A figure with its text.

    Attributes:
        slug: unique on the page.
        title: a few words.
        caption: what it shows, also the text for readers who do not see it; where there is no
            figure, why.
        draw: draws the figure; None where there is none.
    """

    slug: str
    title: str
    caption: str
    draw: figures.Draw | None = None

    @property
    def source(self) -> str:
        """The figure as an address that holds its data."""
        assert self.draw is not None
        data = base64.b64encode(figures.svg(self.draw)).decode("ascii")
        return f"data:image/svg+xml;base64,{data}"


@dataclass(frozen=True)
class Reference:
    """A run that others are compared with, usually BF16.

    Attributes:
        name: what the report calls it.
        metrics: its iterations.
    """

    name: str
    metrics: MetricRows


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs; those whose directories have the same name are called by more of their paths.

    Raises:
        UsageError: one line, if a directory is bad or given twice.
    """
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise UsageError("a run is given twice; give each run once")
    names = [path.name for path in resolved]
    for depth in range(2, max(len(path.parts) for path in resolved) + 1):
        if len(set(names)) < len(names):
            names = ["/".join(path.parts[-depth:]) for path in resolved]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_reference(path: Path) -> Reference:
    """Read the metrics of a reference: a run's directory or its metrics.jsonl.

    It is called `BF16` if no iteration had linears in the lowest precision.

    Raises:
        UsageError: if there are no metrics; one line.
    """
    metrics = read_metrics(path / "metrics.jsonl" if path.is_dir() else path)
    name = (path if path.is_dir() else path.parent).resolve().name
    return Reference(name if metrics.total("lowest_precision_fraction") > 0 else "BF16", metrics)


def make_report(runs: Sequence[RunRecord], reference: Reference | None = None) -> str:
    """Return the page as HTML; the figures are drawn here.

    Args:
        runs: at least one; several are compared.
        reference: the run that gaps are taken to; by default the first of several runs.
    """
    alone = len(runs) == 1
    if reference is None and not alone:
        reference = Reference(runs[0].name, runs[0].metrics)
    tiles = [_tiles(run, reference) for run in runs]
    top = [_failures(run, alone) for run in runs]
    if not alone:
        top = [_comparison(runs, tiles), _settings(runs, True), *top]
    sections: list[tuple[str, Sequence[Picture], Sequence[Table]]] = [
        ("", (), top),
        ("Training", (_loss(runs, reference), _frontiers(runs)), ()),
    ]
    for k, run in enumerate(runs):
        title, prefix = ("Plans", "") if alone else (f"Plans of {run.name}", f"{k + 1}-")
        tables = (_plans_table(run), *_linears_tables(run))
        sections.append((title, _plan_pictures(run, prefix), tables))
    sections.append(("Settings and versions", (), [_settings(runs, False)]))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=", ".join(run.name for run in runs),
        subtitle=_subtitle(runs[0]) if alone else f"{len(runs)} runs compared.",
        tiles=tiles[0] if alone else (),
        sections=sections,
        version=__version__,
    )


def last_gap(metrics: MetricRows, reference: Reference) -> tuple[float | None, int]:
    """Return the mean loss gap over the last tenth of the common iterations, and their number."""
    _, gap = loss_gap(metrics, reference.metrics)
    count = -(-len(gap) // 10)
    return (float(np.mean(gap[-count:])) if count else None), count


def frontier_of(run: RunRecord) -> figures.Points | str:
    """Solve the run's last problem at all targets, with its pins and balance.

    Returns:
        (efficiency, quality loss as share of the uniform lowest precision's), or why there is none.
    """
    if run.problem is None:
        return "The run has made no refresh."
    if run.snip is None or run.uniform_loss is None:
        return "This version of megatron-snip cannot read the run's settings."
    update = {"policy": "snip", "time_limit_s": TIME_LIMIT_S}
    try:
        settings = PlanSettings.from_config(run.snip).model_copy(update=update)
        points = frontier(run.problem, settings, TARGETS)
    except SnipError as error:
        return f"It cannot be computed: {error}"
    known = [(p.efficiency, run.quality_share(p.objective)) for p in points]
    reached = [(e, share) for e, share in known if e is not None and share is not None]
    return reached or "No plan satisfies the run's pins and balance."


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as {dotted key: text}, in their order."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            flat[f"{prefix}{key}"] = "none" if value is None else text
    return flat


# Text and numbers at the top.


def _sim(run: RunRecord) -> str:
    return " (simulated)" if run.simulated else ""


def _progress(run: RunRecord) -> str:
    total = run.train_iters
    return str(run.metrics.last_iteration) + ("" if total is None else f" of {total}")


def _subtitle(run: RunRecord) -> str:
    parts = [f"{_progress(run)} iterations"]
    if run.snip is not None and run.snip.enabled:
        parts.append(f"policy {run.snip.policy}")
        parts.append(f"formats {', '.join(run.snip.formats)} per {run.snip.granularity}{_sim(run)}")
        parts.append(f"a refresh every {run.snip.interval} iterations")
    text = ", ".join(parts) + "."
    if run.simulated:
        text += " Simulated: losses are those of the formats, times are not."
    return text


def _tiles(run: RunRecord, reference: Reference | None) -> list[Tile]:
    metrics, plan = run.metrics, run.plan
    at, _ = metrics.column("validation_loss")
    tiles = [("training loss", number(metrics.last("loss")), "last iteration")]
    if reference is not None:
        gap, count = last_gap(metrics, reference)
        shown = "-" if gap is None else f"{gap:+.4f}"
        note = f"mean of the last {count} common iterations"
        tiles.append((f"loss gap to {reference.name}", shown, note))
    note = f"at iteration {at[-1]}" if at.size else "not measured"
    tiles.append(("validation loss", number(metrics.last("validation_loss")), note))
    share = percent(metrics.last("lowest_precision_fraction"))
    note = f"{run.lowest_formats}{_sim(run)}, target {percent(run.target)}"
    tiles.append(("FLOPs in lowest precision", share, note))
    loss = None if plan is None else run.quality_share(plan.objective)
    tiles.append(("quality loss of the plan", percent(loss), f"of uniform {run.lowest_formats}'s"))
    failed = sum(notice.kind == "kept" for notice in metrics.notices)
    tiles.append(("refreshes", str(len(metrics.column("refresh_s")[0])), f"{failed} failed"))
    wall = metrics.column("wall_s")[1]
    if np.nansum(wall) > 0:
        note = f"{percent(metrics.total('refresh_s') / np.nansum(wall))} of all time in refreshes"
        tiles.append(("time of an iteration", seconds(float(np.nanmedian(wall))), note))
    return tiles


def _comparison(runs: Sequence[RunRecord], tiles: Sequence[list[Tile]]) -> Table:
    """Return the numbers of the tiles, one row per run."""
    names = dict.fromkeys(name for each in tiles for name, _, _ in each)
    rows = []
    for run, each in zip(runs, tiles, strict=True):
        values = {name: value for name, value, _ in each}
        cells = (values.get(name, "-") for name in names)
        rows.append((f"{run.name}{_sim(run)}", _progress(run), *cells))
    columns = ("run", "iterations", *names)
    return Table("The runs compared", columns, tuple(rows), folded=False)


# Pictures.


def _loss(runs: Sequence[RunRecord], reference: Reference | None) -> Picture:
    ends = listing(f"{run.name} {number(run.metrics.last('loss'))}" for run in runs)
    marks = "Dotted lines" if len(runs) == 1 else "Ticks at the bottom"
    caption = f"Training loss, at the end: {ends}. {marks} mark plan changes, red lines failures."
    if reference is not None:
        caption += f" Below: loss minus that of {reference.name}: above zero is worse."
    pair = None if reference is None else (reference.name, reference.metrics)
    return Picture("loss", "Loss", caption, partial(figures.loss_curves, tuple(runs), pair))


def _frontiers(runs: Sequence[RunRecord]) -> Picture:
    title = "Quality loss against efficiency"
    solved = {run.name: frontier_of(run) for run in runs}
    found = {name: points for name, points in solved.items() if not isinstance(points, str)}
    if not found:
        return Picture("frontier", title, str(solved[runs[0].name]))
    losses = {run.name: run.quality_share(run.plan.objective) for run in runs if run.plan}
    plans = {run.name: (run.plan.efficiency, losses[run.name]) for run in runs if run.plan}
    stars = {name: (e, loss) for name, (e, loss) in plans.items() if loss is not None}
    caption = (
        "The least predicted quality loss of any plan at each efficiency, from the last refresh, "
        "as share of the quality loss of the uniform lowest precision. Where the curve becomes "
        "steep, more low precision is expensive. The star is the current plan."
    )
    return Picture("frontier", title, caption, partial(figures.frontier_curves, found, stars))


def _plan_pictures(run: RunRecord, prefix: str) -> list[Picture]:
    if run.plan is None:
        if run.snip is not None and not run.snip.enabled:
            return [Picture("", "No plans", "SNIP was off in this run.")]
        collects = run.snip is not None and run.snip.collect_only
        reason = "The run only measures (collect_only)." if collects else "No plan was applied yet."
        return [Picture("", "No plans", reason), _divergences(run, prefix)]
    plan, lowest = run.plan, "fp4" if run.snip is None else run.snip.lowest_format
    high = [name for name, option in plan.linears.items() if option.share_in(lowest) < 1.0]
    return [
        Picture(
            f"{prefix}plan",
            f"Current plan{_sim(run)}",
            f"Measured at iteration {plan.iteration}, applied at iteration {run.spans[-1].start}: "
            f"{option_counts(plan.linears)}. Efficiency {percent(plan.efficiency)}, policy "
            f"{plan.policy}, {plan.status}. In higher precision: {listing(high) or 'none'}.",
            partial(figures.plan_map, plan.linears),
        ),
        Picture(
            f"{prefix}plan-history",
            "Plans over the iterations",
            "The format of each layer, for every kind of linear. Where it stays the same, "
            "refreshes agree. Where it changes often, two options cost almost the same.",
            partial(figures.plan_history, run.spans),
        ),
        _divergences(run, prefix),
    ]


def _divergences(run: RunRecord, prefix: str) -> Picture:
    title, record = "Divergences", run.divergences
    options = () if record is None else quantized_options(record)
    if record is None or not options:
        return Picture("", title, "The run has measured none.")
    worst = []
    for kind, text in DIVERGENCE_TITLES.items():
        values = {n: v for n, v in record.values(options[-1], kind).items() if v is not None}
        name = max(values, key=lambda n: values[n], default=None)
        worst.append(f"{text} {'-' if name is None else f'{number(values[name], 3)} at {name}'}")
    caption = (
        f"Predicted harm of each option at each linear, measured at iteration {record.iteration}: "
        "the change of the loss, and the relative change of the next update. Bright cells are the "
        f"most fragile linears. Largest under {options[-1]}: {'; '.join(worst)}."
    )
    draw = partial(figures.divergence_maps, record)
    return Picture(f"{prefix}divergences", title, caption, draw)


# Tables.


def _failures(run: RunRecord, alone: bool) -> Table:
    rows = tuple(
        (str(n.iteration), FAILURES.get(n.kind, n.kind), n.message) for n in run.metrics.notices
    )
    title = "Failures" if alone else f"Failures of {run.name}"
    columns = ("iteration", "what failed", "message")
    return Table(title, columns, rows, text_columns=3, folded=False)


def _plans_table(run: RunRecord) -> Table:
    columns = (
        *("applied", "measured", "policy", "status", "efficiency", "quality loss"),
        *(f"of uniform {run.lowest_formats}'s", "gap", "changed", "solver", "waited"),
    )
    rows = tuple(
        (
            str(span.start),
            str(plan.iteration),
            plan.policy,
            plan.status,
            percent(plan.efficiency),
            quality(plan.objective),
            percent(run.quality_share(plan.objective)),
            quality(plan.gap, 2),
            f"{span.num_changed} of {len(span.linears)}",
            seconds(plan.seconds),
            seconds(span.wait_s),
        )
        for span in run.plans
        if (plan := span.plan) is not None
    )
    return Table("All plans", columns, rows, text_columns=0)


def _linears_tables(run: RunRecord) -> list[Table]:
    record, problem = run.divergences, run.problem
    if record is None or problem is None:
        return []
    measures = [(kind, option) for kind in DIVERGENCE_TITLES for option in record.uniform_options]
    total = sum(linear.flops for linear in problem.linears) or 1.0
    chosen = {} if run.plan is None else run.plan.linears
    rows = tuple(
        (
            linear.name,
            str(chosen.get(linear.name, "-")),
            percent(linear.flops / total),
            *(number(record.values(o, kind).get(linear.name), 3) for kind, o in measures),
        )
        for linear in problem.linears[:MAX_LINEARS]
    )
    columns = ("linear", "option", "FLOPs", *(f"{k.partition('_')[0]} {o}" for k, o in measures))
    more = len(problem.linears) - len(rows)
    note = f"{more} more are in divergences/{record.iteration}.json." if more else ""
    title = f"All linears, measured at iteration {record.iteration}"
    return [Table(title, columns, rows, text_columns=2, note=note)]


def _settings(runs: Sequence[RunRecord], only_differences: bool) -> Table:
    flat = [flatten(run.config | {"versions": run.versions}) for run in runs]
    rows = []
    for key in dict.fromkeys(key for values in flat for key in values):
        cells = tuple(values.get(key, "-") for values in flat)
        if not only_differences or (len(set(cells)) > 1 and key != "run_dir"):
            rows.append((key, *cells))
    columns = ("setting", *(run.name for run in runs))
    title = "Settings that differ" if only_differences else "All settings"
    return Table(title, columns, tuple(rows), len(columns), folded=not only_differences)
