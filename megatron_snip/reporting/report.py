"""The report of one run as one HTML file; the template has the page and its text.

The file needs no network and runs no script; its Content-Security-Policy forbids both. The template
escapes all text, since names and settings come from files.
"""

import base64
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from megatron_snip.errors import SnipError, UsageError, listing, printable
from megatron_snip.planning.planner import frontier
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.reporting import figures, text
from megatron_snip.reporting.metrics_file import MetricRows, read_metrics
from megatron_snip.reporting.run_record import (
    Divergences,
    RunRecord,
    check_run_directory,
    only_bf16,
    plan_spans,
)
from megatron_snip.statistics.health_table import MEANINGS
from megatron_snip.version import __version__

TARGETS = tuple(k / 20 for k in range(21))
TIME_LIMIT_S = 2.0  # per target of the frontier

Reference = tuple[str, MetricRows]
"""Name and metrics of the run that a run is compared with, usually BF16."""


def read_reference(path: Path) -> Reference:
    """Read the metrics of a reference: a run's directory or its metrics.jsonl.

    It is called `BF16` if its linears ran in BF16. Without plan files, which a metrics.jsonl alone
    does not have, they did if no iteration had linears in the lowest precision.

    Raises:
        UsageError: if there are no metrics, or a plan's file is bad; one line.
    """
    if not os.path.exists(path):  # unlike Path's, it raises nothing
        raise UsageError(f"cannot find the reference '{path}'; give a run or its metrics.jsonl")
    is_directory = path.is_dir()
    if is_directory:
        check_run_directory(path)
    metrics = read_metrics(path / "metrics.jsonl" if is_directory else path)
    if is_directory:
        folder = path
        is_bf16 = only_bf16(plan_spans(path, metrics))
    else:
        folder = path.parent
        is_bf16 = metrics.total("lowest_precision_fraction") == 0
    return "BF16" if is_bf16 else folder.resolve().name, metrics


def _shown(value: object) -> object:
    """Return a value of the template: HTML cannot hold control characters, escaped or not."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, keep="\n")
    return value


def make_report(
    run: RunRecord,
    reference: Reference | None = None,
    progress: Callable[[float], object] = lambda share: None,
) -> str:
    """Return the page as HTML; the figures are drawn here.

    Args:
        run: the run.
        reference: the run that gaps are taken to, or None.
        progress: called with the share of the work that is done, from 0 to 1.
    """
    points = frontier_of(run, lambda share: progress(0.8 * share))  # most of the time
    progress(0.8)
    environment = Environment(
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (text.number, text.percent, text.quality, text.seconds, listing, text.option_counts)
    environment.filters |= {function.__name__: function for function in filters}
    environment.filters["data_uri"] = _data_uri
    source = files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    is_bf16 = only_bf16(run.plans)
    return environment.from_string(source).render(
        run=run,
        wall_s=run.metrics.column("wall_s")[1],
        nanmedian=np.nanmedian,
        sim=" (simulated)" if run.simulated and not is_bf16 else "",
        is_bf16=is_bf16,
        in_higher_precision=_in_higher_precision(run),
        reference=reference,
        gap=(None, 0) if reference is None else last_gap(run.metrics, reference),
        increases=loss_increases(run.metrics),
        frontier=points,
        figures=figures,
        meanings=MEANINGS,
        largest=_largest,
        settings=flatten(run.config | {"versions": run.versions}),
        version=__version__,
    )


def last_gap(metrics: MetricRows, reference: Reference) -> tuple[float | None, int]:
    """Return the mean loss gap over the last tenth of the common iterations, and its length."""
    _, gap = metrics.gap_to(reference[1])
    count = -(-len(gap) // 10)  # rounded up
    if count == 0:
        return None, 0
    return float(np.mean(gap[-count:])), count


def loss_increases(metrics: MetricRows) -> tuple[int, list[tuple[str, float | None, float | None]]]:
    """Return what the last evaluation by groups of linears found.

    Args:
        metrics: the run's.

    Returns:
        (iteration, [(group, its loss increase, the standard error)]); without such an evaluation 0
        and no groups. The first group is the plan.
    """
    prefix = "increase_of/"
    for row in reversed(metrics.rows):
        values = row.get("evaluated", {})
        names = {"loss_increase": "the plan"}
        for name in values:
            if name.startswith(prefix) and not name.endswith("_error"):
                names[name] = name.removeprefix(prefix).replace("_", " ")
        if len(names) > 1:
            found = [(label, values.get(n), values.get(f"{n}_error")) for n, label in names.items()]
            return row["iteration"], found
    return 0, []


def frontier_of(
    run: RunRecord, progress: Callable[[float], object] = lambda share: None
) -> figures.Points | str:
    """Solve the run's last problem at all targets, with its pins and balance.

    Args:
        run: the run.
        progress: called with the share of the targets that are done, from 0 to 1.

    Returns:
        (efficiency, quality loss as share of the uniform lowest precision's), or why there is none.
    """
    if run.problem is None:
        return "The run has made no refresh."
    if run.snip is None:
        return "This version of megatron-snip cannot read the run's settings."
    update = {"policy": "snip", "time_limit_s": TIME_LIMIT_S}
    try:
        settings = PlanSettings.of(run.snip, pins=run.problem.pins)
        settings = settings.model_copy(update=update)
        points = frontier(run.problem, settings, TARGETS, progress)
    except SnipError as error:
        return f"It cannot be computed: {error}"
    plans = [plan for plan in points.values() if plan is not None]
    curve = [(plan.efficiency, run.quality_share(plan.objective)) for plan in plans]
    reached = [(efficiency, share) for efficiency, share in curve if share is not None]
    return reached or "No plan satisfies the run's pins and balance."


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as {dotted key: text}, in their order."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            flat[f"{prefix}{key}"] = "none" if value is None else shown
    return flat


def _data_uri(figure: Figure) -> str:
    data = base64.b64encode(figures.svg(figure)).decode("ascii")
    return f"data:image/svg+xml;base64,{data}"


def _in_higher_precision(run: RunRecord) -> list[str]:
    """Return the linears that the plan does not run in the lowest precision alone."""
    lowest = "fp4" if run.snip is None else run.snip.lowest_format
    linears = {} if run.plan is None else run.plan.linears
    found = [name for name, option in linears.items() if option.share_in(lowest) < 1.0]
    return ["all linears"] if found and len(found) == len(linears) else found


def _largest(record: Divergences) -> str:
    """Return, as text, the largest loss and weight divergence of the lowest format, and where.

    The record has a quantized uniform option.
    """
    found = []
    for measure in ("loss_divergence", "weight_divergence"):
        by_linear = record.values(record.uniform_quantized_options[-1], measure)
        values = {name: value for name, value in by_linear.items() if value is not None}
        name = max(values, key=lambda n: values[n], default=None)
        worst = "-" if name is None else f"{text.number(values[name], 3)} at {name}"
        found.append(f"{measure.replace('_', ' ')} {worst}")
    return "; ".join(found)
