"""The live view of runs: what their files say, as a terminal shows it while they grow.

    live_view    draws a run: progress, losses, the plan as a grid of colors, what happened last
    follow       reads and draws until the runs have made their steps, or until it is interrupted

Where there is no terminal, `follow` prints a line for every plan and event, and the last step.
Names and messages come from files; what they hold is neither markup nor a terminal's command here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_snip.formats import FORMATS
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, read_plan
from megatron_snip.reporting.linear_grid import make_grid
from megatron_snip.reporting.live_run import LiveRun
from megatron_snip.reporting.metrics_log import EventMark, MetricsLog, PlanMark
from megatron_snip.reporting.report.words import choices, number, percent, printable, seconds

INTERVAL_S = 1.0
_BLOCKS = "".join(chr(0x2581 + eighth) for eighth in range(8))
_ASCII_BLOCKS = "_.:-=+*#"
_COLORS = ((9, "bright_black"), (5, "dodger_blue2"), (4, "dark_orange"), (0, "red"))
"""By the least bits of the formats that take a color."""
_MAX_ROWS = 40


def follow(runs: Sequence[LiveRun], console: Console, wait: Callable[[float], None]) -> None:
    """Show runs until all have made their steps, or until the user interrupts.

    Args:
        runs: at least one.
        console: where to show them.
        wait: lets some seconds pass between two looks (`time.sleep`).

    Raises:
        UsageError: if a file is damaged.
    """
    if not console.is_terminal:
        _follow_in_lines(runs, console, wait)
        return
    plain = not console.encoding.lower().startswith("utf")
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            for run in runs:
                run.refresh()
            live.update(Group(*(live_view(run, plain) for run in runs)), refresh=True)
            if all(run.finished for run in runs):
                return
            wait(INTERVAL_S)


def live_view(run: LiveRun, ascii_only: bool = False) -> RenderableType:
    """Return what the terminal shows of a run.

    Args:
        run: as last read.
        ascii_only: the terminal has no block characters.
    """
    if not run.metrics.rows:
        return Panel(Text("waiting for the first step"), title=_title(run), title_align="left")
    parts: list[RenderableType] = [_progress(run), _numbers(run, ascii_only)]
    if run.plan is not None and run.mark is not None:
        parts += [Text(), _plan_line(run.plan, run.mark), plan_grid(run.plan.linears)]
    for event in run.metrics.events[-3:]:
        parts.append(Text(_event_line(event), style="red"))
    return Panel(Group(*parts), title=_title(run), title_align="left")


def plan_grid(linears: dict[str, Option]) -> Table:
    """Return a plan as a grid: a row a layer, a cell a GEMM, its color the format's bits.

    Only as many layers as fit a screen are shown; the first and the last ones are.
    """
    grid = make_grid(linears)
    mixed = any(len(set(option.formats)) > 1 for option in linears.values())
    cells: dict[tuple[int, int], Text] = {
        grid.places[name]: _cell(option, mixed) for name, option in linears.items()
    }
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("layer", justify="right", style="dim")
    for column in grid.columns:
        table.add_column(Text(printable(column)), no_wrap=True)
    rows = list(range(len(grid.rows)))
    half = _MAX_ROWS // 2
    shown = rows if len(rows) <= _MAX_ROWS else [*rows[:half], -1, *rows[-half:]]
    for row in shown:
        if row < 0:
            table.add_row("...")
            continue
        line = [cells.get((row, column), Text()) for column in range(len(grid.columns))]
        table.add_row(Text(printable(grid.rows[row])), *line)
    return table


def sparkline(values: Sequence[float], width: int, blocks: str = _BLOCKS) -> str:
    """Return values as at most `width` of eight blocks, each the mean of its share of values."""
    if not values:
        return ""
    size = -(-len(values) // width)
    groups = [values[k : k + size] for k in range(0, len(values), size)]
    means = [sum(group) / len(group) for group in groups]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(blocks[round((mean - low) / span * 7)] for mean in means)


def _cell(option: Option, mixed: bool) -> Text:
    """Return the formats in color: one word, or the bits of fprop, dgrad, wgrad where some mix."""
    text = Text()
    if not mixed:
        return text.append(f" {option} ".ljust(7), style=_style(option.fprop))
    for name in option.formats:
        text.append(f" {FORMATS[name].bits:<2}", style=_style(name))
    return text


def _style(name: str) -> str:
    color = next(color for least, color in _COLORS if FORMATS[name].bits >= least)
    return f"white on {color}"


def _title(run: LiveRun) -> Text:
    if not run.metrics.rows:
        return Text(printable(str(run.path)))
    return Text(printable(f"{run.path} ({'finished' if run.finished else 'running'})"))


def _event_line(event: EventMark) -> str:
    return printable(f"step {event.step}: {event.kind}: {event.message}")


def _progress(run: LiveRun) -> RenderableType:
    made = run.metrics.last_step + 1
    if run.total is None:
        return Text(f"step {made}")
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=run.total, completed=made, width=40)
    line.add_row(Text(f"step {made} of {run.total}"), bar, Text(_remaining(run, made)))
    return line


def _remaining(run: LiveRun, made: int) -> str:
    """Say how long the rest takes at the pace of the steps recorded so far."""
    _, walls = run.metrics.column("wall_s")
    if run.total is None or run.finished or walls.size == 0:
        return ""
    return f"about {seconds(float(walls.mean()) * (run.total - made))} left"


def _numbers(run: LiveRun, ascii_only: bool) -> RenderableType:
    metrics = run.metrics
    _, losses = metrics.column("loss")
    finite = [float(loss) for loss in losses[-400:] if loss == loss]
    line = Text(sparkline(finite, 40, _ASCII_BLOCKS if ascii_only else _BLOCKS), "cyan")
    table = Table.grid(padding=(0, 2))
    table.add_row("loss", number(metrics.last("loss")), line)
    checked, _ = metrics.column("validation_loss")
    if checked.size:
        note = f"at step {checked[-1]}"
        table.add_row("validation", number(metrics.last("validation_loss")), Text(note, "dim"))
    share = metrics.last("lowest_precision_fraction")
    table.add_row(f"FLOPs in {run.lowest_formats}", percent(share), _upcoming(run))
    speed = metrics.last("tokens_per_s")
    if speed is not None:
        table.add_row("tokens/s", f"{speed:,.0f}", _overhead(metrics))
    return table


def _upcoming(run: LiveRun) -> Text:
    step = None if run.finished else run.next_refresh
    return Text("" if step is None else f"next refresh at step {step}", "dim")


def _overhead(metrics: MetricsLog) -> Text:
    total = sum(metrics.column("wall_s")[1])
    measured = sum(metrics.column("refresh_s")[1])
    return Text(f"{percent(measured / total)} of the time measuring" if total else "", "dim")


def _plan_line(plan: PrecisionPlan, mark: PlanMark) -> Text:
    return Text(
        f"plan of iteration {plan.iteration}, applied before step {mark.step}: "
        f"{choices(plan.linears)}; "
        f"efficiency {percent(plan.efficiency)}, quality loss {number(plan.objective)}, "
        f"{plan.status}, {mark.changed} changed, waited {seconds(mark.wait_s)}"
    )


def _follow_in_lines(
    runs: Sequence[LiveRun], console: Console, wait: Callable[[float], None]
) -> None:
    told: dict[Path, tuple[int, int]] = {run.path: (-1, -1) for run in runs}
    while True:
        for run in runs:
            if run.refresh():
                told[run.path] = _tell(run, console, told[run.path])
        if all(run.finished for run in runs):
            break
        wait(INTERVAL_S)
    for run in runs:
        loss = number(run.metrics.last("loss"))
        _print(console, f"{run.path}: finished after step {run.metrics.last_step}, loss {loss}")


def _tell(run: LiveRun, console: Console, since: tuple[int, int]) -> tuple[int, int]:
    """Print plans and events after the steps `since`; return the last ones' steps."""
    plans, events = run.metrics.plans, run.metrics.events
    for mark in plans:
        if mark.step > since[0]:
            plan = read_plan(run.path / "plans" / f"{mark.plan_step}.json")
            _print(console, f"{run.path}: step {mark.step}: {_plan_line(plan, mark)}")
    for event in events:
        if event.step > since[1]:
            _print(console, f"{run.path}: {_event_line(event)}")
    last_plan = plans[-1].step if plans else -1
    return last_plan, events[-1].step if events else -1


def _print(console: Console, line: Any) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
