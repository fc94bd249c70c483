"""Which pictures a report shows, in order, and what it says of them.

What several runs have in common is drawn once with all of them; a plan, its history and its
divergences are drawn for each run. What cannot be drawn is named with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_snip.options import Option
from megatron_snip.reporting.divergence_record import DivergenceRecord, Kind
from megatron_snip.reporting.figures import divergence, pareto, plan, stages, time, training
from megatron_snip.reporting.phases import phases_of
from megatron_snip.reporting.report.frontiers import frontier_of
from megatron_snip.reporting.report.picture import Missing, Picture
from megatron_snip.reporting.report.words import choices, listing, number, percent, plural, seconds
from megatron_snip.reporting.run_record import RunRecord

Item = Picture | Missing


@dataclass(frozen=True)
class Section:
    """Pictures under a heading.

    Attributes:
        title: the heading.
        items: in order.
    """

    title: str
    items: tuple[Item, ...]


def common_section(runs: Sequence[RunRecord]) -> Section:
    """Return what all runs are drawn in together."""
    items = [_loss(runs), _share(runs), _frontiers(runs), *_time(runs)]
    return Section("Training" if len(runs) == 1 else "All runs", tuple(items))


def run_section(run: RunRecord, prefix: str) -> Section:
    """Return what is drawn for one run.

    Args:
        run: the run.
        prefix: put before each picture's file name.
    """
    title = "Plans" if not prefix else f"Plans of {run.name}"
    if not run.plans and run.divergences is None:
        return Section(title, (Missing("Nothing to show", _no_plan(run)),))
    items = [_plan(run, prefix), _stages(run, prefix), _history(run, prefix)]
    return Section(title, (*items, _divergences(run, prefix)))


def _loss(runs: Sequence[RunRecord]) -> Item:
    known = [run for run in runs if run.metrics.last("loss") is not None]
    if not known:
        return Missing("Loss", "No training loss has been logged yet.")
    ends = listing(f"{run.name} {number(run.metrics.last('loss'))}" for run in known)
    if len(runs) == 1:
        changes = sum(span.changed > 0 for span in runs[0].plans)
        caption = (
            f"Training loss at every logged step; dots are validation losses. "
            f"Dashed lines mark the {plural(changes, 'plan change')}: a plan that hurts shows as a "
            "step upwards just behind one."
        )
        events = len(runs[0].metrics.events)
        caption += f" Red lines mark {plural(events, 'event')}, listed below." if events else ""
    else:
        caption = (
            "Training losses; circles are validation losses, ticks at the bottom plan changes. "
            f"Below: each run minus {runs[0].name}, averaged over a hundredth of the run; above "
            "zero is worse."
        )
    alt = f"Line chart of the training loss over {runs[0].num_steps} steps. It ends at: {ends}."
    return Picture("loss", "Loss", caption, alt, partial(training.loss_curves, runs=tuple(runs)))


def _share(runs: Sequence[RunRecord]) -> Item:
    ends = listing(
        f"{run.name} {percent(run.metrics.last('lowest_precision_fraction'))}" for run in runs
    )
    return Picture(
        "share",
        "FLOPs in the lowest precision",
        "Share of the linears' FLOPs that ran in the lowest precision on offer; the dashed line is "
        "the target. It is zero until the first plan is applied.",
        f"Line chart of the share of linear FLOPs in the lowest precision. It ends at: {ends}.",
        partial(training.precision_share, runs=tuple(runs)),
        wide=False,
    )


def _frontiers(runs: Sequence[RunRecord]) -> Item:
    title = "Frontier at the last refresh"
    solved = [frontier_of(run) for run in runs]
    found = [entry for entry in solved if not isinstance(entry, str)]
    if not found:
        return Missing(title, str(solved[0]))
    first = found[0]
    ends = [p.objective for p in first.points if p.objective is not None]
    caption = (
        "The least quality loss that any plan can have at each efficiency, by the divergences of "
        f"step {first.step}. Where the curve turns upwards, more low precision gets expensive. "
    )
    caption += (
        "Each star is the plan in force; losses of different runs are on scales of their own."
        if len(found) > 1
        else "The star is the plan in force, judged by that step's divergences."
    )
    alt = (
        f"Line chart of quality loss against efficiency; for {first.name} it rises from "
        f"{number(ends[0])} to {number(ends[-1])}."
    )
    draw = partial(pareto.pareto_curves, frontiers=tuple(found))
    return Picture("frontier", title, caption, alt, draw, wide=False)


def _time(runs: Sequence[RunRecord]) -> list[Item]:
    timed = [(run, phases) for run in runs if (phases := phases_of(run)) is not None]
    if not timed:
        return [Missing("Time", "The run has not recorded wall times.")]
    said = [
        f"{run.name}: steps {seconds(p.step)}, refreshes {seconds(p.refresh)} "
        f"({percent(p.refresh / p.wall)}), waiting {seconds(p.wait)}, solver {seconds(p.solve)}"
        for run, p in timed
    ]
    text = "; ".join(said)
    names = tuple(run.name for run, _ in timed)
    total = partial(time.time_bars, names=names, phases=tuple(phases for _, phases in timed))
    by_step = partial(time.step_seconds, runs=tuple(run for run, _ in timed))
    what = text if len(timed) > 1 else text.partition(": ")[2]
    return [
        Picture(
            "time",
            "Where the time went",
            f"{what[0].upper()}{what[1:]}. A step holds forward, backward and optimizer, "
            "evaluations and checkpoints; the solver works beside training.",
            f"Stacked bars of wall time. {text}.",
            total,
            wide=False,
        ),
        Picture(
            "step-time",
            "Time of each step",
            "Wall time from one step to the next. A step with a refresh pays for two extra passes; "
            "others peak when they evaluate or save.",
            f"Line chart of seconds a step for {listing(names)}.",
            by_step,
            wide=False,
        ),
    ]


def _plan(run: RunRecord, prefix: str) -> Item:
    title = "The plan in force"
    if run.plan is None:
        return Missing(title, _no_plan(run))
    now = run.plan
    high = [name for name, option in now.linears.items() if _protected(option, run)]
    kept = f" Kept in higher precision: {listing(high)}." if high else ""
    return Picture(
        f"{prefix}plan",
        title,
        f"Measured at iteration {now.iteration}, applied before step {run.spans[-1].start}: "
        f"{choices(now.linears)}. Efficiency {percent(now.efficiency)} "
        f"(target {percent(now.target)}), policy {now.policy}, {now.status}.",
        f"Grid of layers and linears, colored by format: {choices(now.linears)}.{kept}",
        partial(plan.plan_map, linears=now.linears),
        wide=False,
    )


def _history(run: RunRecord, prefix: str) -> Item:
    title = "The plan over time"
    if not run.plans:
        return Missing(title, _no_plan(run))
    changed = listing(f"step {span.start}: {span.changed} changed" for span in run.plans)
    return Picture(
        f"{prefix}plan-history",
        title,
        "Which format each layer ran in at each training step, for every kind of linear. "
        "Stripes that stay mean that refreshes agree; flicker means that options are close.",
        f"Grids of layers against training steps, colored by format. Plans: {changed}.",
        partial(plan.plan_history, spans=run.spans),
    )


def _stages(run: RunRecord, prefix: str) -> Item:
    title = "Efficiency of each pipeline stage"
    if run.plan is None:
        return Missing(title, _no_plan(run))
    lowest = "fp4" if run.snip is None else run.snip.lowest_format
    each = listing(f"stage {k} {percent(value)}" for k, value in enumerate(run.plan.stages))
    return Picture(
        f"{prefix}stages",
        title,
        f"Share of each stage's linear FLOPs in the lowest precision: {each}. A pipeline waits for "
        "its slowest stage; --snip-pipeline-balance evens them out.",
        f"Bars of efficiency by pipeline stage: {each}.",
        partial(stages.stage_bars, spans=run.plans, target=run.target, lowest=lowest),
        wide=False,
    )


def _divergences(run: RunRecord, prefix: str) -> Item:
    title = "Divergences at the last refresh"
    record = run.divergences
    if record is None or not divergence.quantizing_options(record):
        return Missing(title, "The run has measured none.")
    options = divergence.quantizing_options(record)
    worst = [
        f"{divergence.TITLES[kind]} {worst_linear(record, options[-1], kind)}"
        for kind in divergence.TITLES
    ]
    text = f"Largest under {options[-1]}: {'; '.join(worst)}."
    return Picture(
        f"{prefix}divergences",
        title,
        f"Predicted harm of each option at each linear, measured at step {record.step}: the change "
        "of the loss, and the relative change of the next update. Bright cells are the ones that "
        f"the plan protects first. {text}",
        f"Heat maps of loss and weight divergence by layer and linear, for {listing(options)}. "
        f"{text}",
        partial(divergence.divergence_maps, record=record),
    )


def worst_linear(record: DivergenceRecord, option: str, kind: Kind) -> str:
    """Return the linear with the largest divergence and its value, in words."""
    known = {n: value for n, value in record.values(option, kind).items() if value is not None}
    if not known:
        return "not measured"
    name = max(known, key=lambda linear: known[linear])
    return f"{number(known[name], 3)} ({name})"


def _protected(option: Option, run: RunRecord) -> bool:
    lowest = None if run.snip is None else run.snip.lowest_format
    return lowest is not None and option.share_in(lowest) < 1.0


def _no_plan(run: RunRecord) -> str:
    if run.snip is not None and not run.snip.enabled:
        return "SNIP was off in this run."
    if run.snip is not None and run.snip.collect_only:
        return "The run measures only (collect_only)."
    return "No plan has been applied yet."
