"""Report of a comparison: one HTML page, drawn like the report of a run; PNGs beside it.

A part for every table of the comparison: who lost how much, how that came about over the steps,
what it is worth in predicted speed, and which linears each contender protected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from megatron_snip.comparison.curves import drawn_rows, gap_against_time, gap_bars, gap_curves
from megatron_snip.comparison.low_shares import Shares, low_share_maps, low_shares
from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.run import Entry
from megatron_snip.comparison.settings import ComparisonConfig
from megatron_snip.comparison.table import RIVAL, Table
from megatron_snip.comparison.text import LEGEND, columns, to_json
from megatron_snip.reporting.report.build import Report
from megatron_snip.reporting.report.page import Page, Part, page_html
from megatron_snip.reporting.report.picture import Missing, Picture, Rendering, render
from megatron_snip.reporting.report.tables import Table as PageTable
from megatron_snip.reporting.report.tables import flatten
from megatron_snip.reporting.report.words import joined, listing, plural


def make_comparison_report(
    tables: Sequence[Table],
    entries: Sequence[Entry],
    outcomes: Mapping[str, Outcome],
    config: ComparisonConfig,
) -> Report:
    """Return the page and its pictures.

    Args:
        tables: of the comparison, at least one.
        entries: all of the comparison.
        outcomes: of the runs that have finished, by key.
        config: what was compared.
    """
    parts = [_part(table, entries, outcomes) for table in tables]
    whole = to_json((), config)
    settings = PageTable("All settings", ("setting", "value"), _rows(whole["settings"]), 2)
    origin = {"commit": whole["commit"], **whole["machine"]}
    made = PageTable("Machine and versions", ("what", "value"), _rows(origin), 2)
    parts.append(Part("Settings and versions", (), (settings, made)))
    page = Page(
        title=f"Comparison {config.output.resolve().name}",
        subtitle=_subtitle(tables, outcomes, entries),
        tiles=(),
        tables=(),
        parts=tuple(parts),
    )
    drawn = [item for part in parts for item in part.pictures if isinstance(item, Rendering)]
    return Report(page_html(page), {f"{item.picture.slug}.png": item.png for item in drawn})


def _part(table: Table, entries: Sequence[Entry], outcomes: Mapping[str, Outcome]) -> Part:
    head, *rows = columns(table)
    shown = PageTable(
        "Table", head, tuple(rows), note=" ".join(LEGEND.replace("`", "").split()), folded=False
    )
    if not drawn_rows(table):
        missing = Missing("Gaps", "No contender has finished a seed that BF16 has finished too.")
        return Part(table.title, (missing,), (shown,))
    items: list[Picture | Missing] = [*_gaps(table, entries, outcomes), *_times(table)]
    items.append(_protected(table, low_shares(table, entries, outcomes)))
    drawn = (render(item) if isinstance(item, Picture) else item for item in items)
    return Part(table.title, tuple(drawn), (shown,))


def _gaps(
    table: Table, entries: Sequence[Entry], outcomes: Mapping[str, Outcome]
) -> tuple[Picture, Picture]:
    rows, slug = drawn_rows(table), table.slug
    said = "; ".join(f"{r.contender} {1e3 * r.gap.mean:.1f}" for r in rows)
    lost = [r.contender for r in rows if math.isnan(r.gap.mean)]
    note = f" Losses that are not finite: {listing(lost)}." if lost else ""
    return (
        Picture(
            f"{slug}-gaps",
            "What each policy loses against BF16",
            "Held-out loss at the end minus BF16's on the same data, in thousandths of a nat; the "
            f"line is one standard deviation over seeds.{note}",
            f"Bars of the gap by policy, in thousandths: {said}.",
            partial(gap_bars, table=table),
            wide=False,
        ),
        Picture(
            f"{slug}-curves",
            "How the gap comes about",
            "Training loss minus BF16's of the same step, running mean, mean over seeds. A line "
            "that keeps rising is a cost that adds up; one that falls is a shock that passes.",
            f"Line chart of the departure from BF16's training loss for {_names(table)}.",
            partial(gap_curves, table=table, entries=tuple(entries), outcomes=dict(outcomes)),
            wide=False,
        ),
    )


def _times(table: Table) -> tuple[Picture | Missing, ...]:
    return tuple(_time(table, k, device) for k, device in enumerate(table.rows[0].step_time))


def _time(table: Table, place: int, device: str) -> Picture | Missing:
    title = f"Quality beside speed: {device}"
    unknown = [r.contender for r in drawn_rows(table) if math.isnan(r.step_time[device])]
    if unknown:
        reason = f"Not known is what ran in which format in some runs of {listing(unknown)}."
        return Missing(title, reason)
    return Picture(
        f"{table.slug}-time-{place}",
        title,
        f"Predicted step time on {device} over BF16's against the gap. Down is better, left is "
        "faster; a policy is worth having if none that is as fast or faster lies below it.",
        f"Scatter chart of gap against predicted step time for {_names(table)}.",
        partial(gap_against_time, table=table, device=device),
        wide=False,
    )


def _protected(table: Table, shares: Mapping[str, Shares]) -> Picture | Missing:
    title = "What each policy protects"
    if not shares:
        reason = (
            "No contender treats linears differently, or what ran in which format is not known."
        )
        return Missing(title, reason)
    whose = RIVAL if RIVAL in shares else next(iter(shares))
    mean = {name: sum(each) / len(each) for name, each in shares[whose].items()}
    kept = [name for name in sorted(mean, key=mean.__getitem__) if mean[name] < max(mean.values())]
    most = f"{whose} keeps, the most first, {listing(kept)}." if kept else ""
    return Picture(
        f"{table.slug}-linears",
        title,
        f"Share of the steps that each GEMM of each linear ran in {table.lowest} (fprop, dgrad, "
        "wgrad from the left), mean over seeds: dark is kept in higher precision, bright is low. "
        f"{most}",
        f"Maps of layers and linears for {listing(shares)}. {most}",
        partial(low_share_maps, shares=dict(shares), low=table.lowest),
    )


def _names(table: Table) -> str:
    return joined([row.contender for row in drawn_rows(table)])


def _subtitle(
    tables: Sequence[Table], outcomes: Mapping[str, Outcome], entries: Sequence[Entry]
) -> str:
    contenders = dict.fromkeys(row.contender for table in tables for row in table.rows)
    runs = {entry.run.key for entry in entries}  # tables share those of uniform contenders
    return (
        f"{plural(len(contenders), 'contender')}, "
        f"{len(runs & set(outcomes))} of {plural(len(runs), 'run')} finished."
    )


def _rows(values: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    return tuple(flatten(dict(values)).items())
