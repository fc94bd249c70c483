"""The report of one run as one HTML file.

The file needs no network and runs no script; its Content-Security-Policy forbids both. The template
escapes all text, since names and settings come from files.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from megatron_snip.errors import SnipError
from megatron_snip.planning.pareto import frontier
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.reporting import figures
from megatron_snip.reporting.figures import DIVERGENCE_TITLES, loss_gap, quantized_options
from megatron_snip.reporting.run_record import (
    MetricRows,
    RunRecord,
    only_bf16,
    plan_spans,
    read_metrics,
)
from megatron_snip.reporting.text import listing, number, option_counts, percent, quality, seconds
from megatron_snip.statistics.health_table import FINDING_COLUMNS, MEANINGS
from megatron_snip.version import __version__

TEMPLATE = "report.html.j2"
FAILURES = {
    "refresh_failed": "refresh failed, plan unchanged",
    "guard": "guard: bad loss",
    "reverted": "plan reverted",
    "health": "health alert",
}
"""Kinds of notices, as the table of failures names them."""

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
        folded: whether the table is shown only on demand.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
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


Reference = tuple[str, MetricRows]
"""Name and metrics of the run that a run is compared with, usually BF16."""


def read_reference(path: Path) -> Reference:
    """Read the metrics of a reference: a run's directory or its metrics.jsonl.

    It is called `BF16` if its linears ran in BF16. Without plan files, which a metrics.jsonl alone
    does not have, they did if no iteration had linears in the lowest precision.

    Raises:
        UsageError: if there are no metrics, or a plan's file is bad; one line.
    """
    metrics = read_metrics(path / "metrics.jsonl" if path.is_dir() else path)
    name = (path if path.is_dir() else path.parent).resolve().name
    bf16 = metrics.total("lowest_precision_fraction") == 0
    if path.is_dir():
        bf16 = only_bf16(plan_spans(path, metrics))
    return "BF16" if bf16 else name, metrics


def make_report(run: RunRecord, reference: Reference | None = None) -> str:
    """Return the page as HTML; the figures are drawn here.

    Args:
        run: the run.
        reference: the run that gaps are taken to, or None.
    """
    settings = tuple(flatten(run.config | {"versions": run.versions}).items())
    sections: list[tuple[str, Sequence[Picture], Sequence[Table]]] = [
        ("", (), [_failures(run)]),
        ("Training", (_loss(run, reference), _frontier(run)), ()),
        ("Plans", _plan_pictures(run), [_plans_table(run)]),
        ("Health", _health(run), _worst(run) if run.health else ()),
        ("Settings and versions", (), [Table("All settings", ("setting", "value"), settings, 2)]),
    ]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=run.name,
        subtitle=_subtitle(run),
        tiles=_tiles(run, reference),
        sections=sections,
        version=__version__,
    )


def last_gap(metrics: MetricRows, reference: Reference) -> tuple[float | None, int]:
    """Return the mean loss gap over the last tenth of the common iterations, and their number."""
    _, gap = loss_gap(metrics, reference[1])
    count = -(-len(gap) // 10)
    return (float(np.mean(gap[-count:])) if count else None), count


def frontier_of(run: RunRecord) -> figures.Points | str:
    """Solve the run's last problem at all targets, with its pins and balance.

    Returns:
        (efficiency, quality loss as share of the uniform lowest precision's), or why there is none.
    """
    if run.problem is None:
        return "The run has made no refresh."
    if run.snip is None:
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
    return " (simulated)" if run.simulated and not only_bf16(run.plans) else ""


def _subtitle(run: RunRecord) -> str:
    of = "" if run.train_iters is None else f" of {run.train_iters}"
    parts = [f"{run.metrics.last_iteration}{of} iterations"]
    if run.snip is not None and run.snip.enabled:
        parts.append(f"policy {run.snip.policy}")
        parts.append(f"formats {', '.join(run.snip.formats)} per {run.snip.granularity}{_sim(run)}")
        parts.append(f"a refresh every {run.snip.interval} iterations")
    text = ", ".join(parts) + "."
    if _sim(run):
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
        tiles.append((f"loss gap to {reference[0]}", shown, note))
    elif not only_bf16(run.plans):
        tiles.append(("loss gap to BF16", "-", "unknown: give --reference, a run in BF16"))
    note = f"at iteration {at[-1]}" if at.size else "not measured"
    tiles.append(("validation loss", number(metrics.last("validation_loss")), note))
    share = percent(metrics.last("lowest_precision_fraction"))
    note = f"{run.lowest_formats}{_sim(run)}, target {percent(run.target)}"
    tiles.append(("FLOPs in lowest precision", share, note))
    loss = None if plan is None else run.quality_share(plan.objective)
    note = f"100%: all linears in {run.lowest_formats}; 0%: BF16"
    tiles.append(("quality loss of the plan", percent(loss), note))
    failed = sum(notice.kind == "refresh_failed" for notice in metrics.notices)
    tiles.append(("refreshes", str(len(metrics.column("refresh_s")[0])), f"{failed} failed"))
    wall = metrics.column("wall_s")[1]
    if np.nansum(wall) > 0:
        note = f"{percent(metrics.total('refresh_s') / np.nansum(wall))} of all time in refreshes"
        time = seconds(float(np.nanmedian(wall)))
        tiles.append((f"time of an iteration{_sim(run)}", time, note))
    return tiles


# Pictures.


def _loss(run: RunRecord, reference: Reference | None) -> Picture:
    end = number(run.metrics.last("loss"))
    caption = f"Training loss, {end} at the end. Dotted lines: plan changes. Red lines: failures."
    if reference is not None:
        caption += f" Below: loss minus that of {reference[0]}; above zero is worse."
    return Picture("loss", "Loss", caption, partial(figures.loss_curves, run, reference))


def _frontier(run: RunRecord) -> Picture:
    title, points = "Quality loss against efficiency", frontier_of(run)
    if isinstance(points, str):
        return Picture("frontier", title, points)
    loss = None if run.plan is None else run.quality_share(run.plan.objective)
    current = None if run.plan is None or loss is None else (run.plan.efficiency, loss)
    caption = (
        "The least predicted quality loss of any plan at each efficiency, from the last refresh, "
        f"as share of the quality loss with all linears in {run.lowest_formats}. Where the curve "
        "becomes steep, more low precision is expensive. The star is the current plan."
    )
    draw = partial(figures.frontier_curve, points, current, run.lowest_formats)
    return Picture("frontier", title, caption, draw)


def _plan_pictures(run: RunRecord) -> list[Picture]:
    if run.plan is None:
        if run.snip is not None and not run.snip.enabled:
            return [Picture("", "No plans", "SNIP was off in this run.")]
        collects = run.snip is not None and run.snip.collect_only
        reason = "The run only measures (collect_only)." if collects else "No plan was applied yet."
        return [Picture("", "No plans", reason), _divergences(run)]
    plan, lowest = run.plan, "fp4" if run.snip is None else run.snip.lowest_format
    high = [name for name, option in plan.linears.items() if option.share_in(lowest) < 1.0]
    return [
        Picture(
            "plan",
            f"Current plan{_sim(run)}",
            f"Planned at iteration {plan.iteration}, applied at iteration {run.plans[-1].start}: "
            f"{option_counts(plan.linears)}. Efficiency {percent(plan.efficiency)}, policy "
            f"{plan.policy}, {plan.status}. In higher precision: {listing(high) or 'none'}.",
            partial(figures.plan_map, plan.linears),
        ),
        Picture(
            "plan-history",
            "Plans over the iterations",
            "The format of each layer, for every kind of linear. Where it stays the same, "
            "refreshes agree. Where it changes often, two options cost almost the same.",
            partial(figures.plan_history, run.plans),
        ),
        _divergences(run),
    ]


def _divergences(run: RunRecord) -> Picture:
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
        f"Divergences of each option at each linear, measured at iteration {record.iteration}: "
        "scores of how much its errors hurt the loss and change the next update. Bright cells are "
        f"the most fragile linears. Largest under {options[-1]}: {'; '.join(worst)}."
    )
    draw = partial(figures.divergence_maps, record)
    return Picture("divergences", title, caption, draw)


def _health(run: RunRecord) -> list[Picture]:
    if not run.health or run.health[-1].lowest is None:
        return []
    when = " and ".join(str(table.iteration) for table in run.health)
    caption = (
        f"What {run.health[-1].lowest} does to each operand, at iteration {when}"
        f"{': before the first plan and at the last refresh' if len(run.health) > 1 else ''}. "
        "Bright cells lose the most. SQNR is the signal over the quantization error: 6 dB less is "
        "twice the error. Underflow is the share of elements that become zero."
    )
    text = (
        "Shares of the elements by log2 of their magnitude, of the linears with the lowest SQNR of "
        f"an operand in {run.health[-1].lowest}, at iteration {when}; SQNR in dB at the last of "
        "them. The wider it is within a tile, the more underflows."
    )
    maps, histograms = figures.health_maps, figures.health_histograms
    return [
        Picture("health", "SQNR and underflow", caption, partial(maps, run.health)),
        Picture("health-worst", "Three worst linears", text, partial(histograms, run.health)),
    ]


# Tables.


def _failures(run: RunRecord) -> Table:
    rows = tuple(
        (str(n.iteration), FAILURES.get(n.kind, n.kind), n.message) for n in run.metrics.notices
    )
    columns = ("iteration", "what happened", "message")
    return Table("Failures and alerts", columns, rows, text_columns=3, folded=False)


def _worst(run: RunRecord) -> list[Table]:
    tables = []
    for measure, rows in groupby(run.health[-1].worst(), key=lambda row: row[0]):
        cells = tuple((*texts, number(value)) for _, *texts, value in rows)
        title = f"Worst {measure} at iteration {run.health[-1].iteration}: {MEANINGS[measure]}"
        tables.append(Table(title, FINDING_COLUMNS[1:], cells, 3))
    return tables


def _plans_table(run: RunRecord) -> Table:
    columns = (
        *("applied", "planned", "policy", "status", "target", "efficiency", "quality loss"),
        *(f"of uniform {run.lowest_formats}'s", "gap", "changed", "solver", "waited"),
        *("predicted saving of a step", "mean step"),
    )
    rows = tuple(
        (
            str(span.start),
            str(plan.iteration),
            plan.policy,
            plan.status,
            percent(plan.target),
            percent(plan.efficiency),
            quality(plan.objective),
            percent(run.quality_share(plan.objective)),
            quality(plan.gap, 2),
            f"{span.num_changed} of {len(plan.linears)}",
            seconds(plan.seconds),
            seconds(span.wait_s),
            seconds(span.saving_s),
            seconds(span.step_s),
        )
        for span in run.plans
        for plan in [span.plan]
    )
    return Table("All plans", columns, rows, text_columns=0)
