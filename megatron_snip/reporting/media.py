"""Pictures and numbers of a refresh and a plan, for writers that show more than scalars.

Drawing needs matplotlib (`pip install 'megatron-snip[report]'`); without it, pictures are left out
with one warning and everything else is logged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from megatron_snip.divergence.quality import DivergenceTable, divergences_dict
from megatron_snip.log import warn_once
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.divergence_record import divergence_record
from megatron_snip.reporting.reporter import Refresh

logger = logging.getLogger(__name__)

PLAN_COLUMNS = ("linear", "fprop", "dgrad", "wgrad")
"""Of the table of a plan."""


def plan_rows(plan: PrecisionPlan) -> list[tuple[str, str, str, str]]:
    """Return one row a linear, as `PLAN_COLUMNS` names them."""
    return [(name, *option.formats) for name, option in plan.linears.items()]


def divergence_values(table: DivergenceTable) -> dict[str, list[float]]:
    """Return {name: values over linears} of the uniform lowest precision, as logarithms.

    Divergences span orders of magnitude; what is zero or not measured has no logarithm and is left
    out.
    """
    lowest = table.of_lowest()
    measures = {
        "snip/divergence/loss_log10": [d.loss_divergence for d in lowest],
        "snip/divergence/weight_log10": [d.weight_divergence for d in lowest],
    }
    return {
        name: [math.log10(v) for v in values if math.isfinite(v) and v > 0]
        for name, values in measures.items()
    }


@contextmanager
def plan_figure(plan: PrecisionPlan) -> Iterator[Any]:
    """Yield a matplotlib figure of a plan, to be rendered within, or None without matplotlib."""
    if not _can_draw():
        yield None
        return
    from megatron_snip.reporting.figures.canvas import HALF
    from megatron_snip.reporting.figures.plan import plan_map

    with HALF.style():
        yield _opaque(plan_map(HALF, plan.linears), HALF.theme.surface)


@contextmanager
def divergence_figure(refresh: Refresh) -> Iterator[Any]:
    """Yield a figure of a refresh's divergences, to be rendered within, or None."""
    record = divergence_record(divergences_dict(refresh.divergences, refresh.statistics))
    if not _can_draw() or all(option == "bf16" for option in record.uniform_options):
        yield None
        return
    from megatron_snip.reporting.figures.canvas import WIDE
    from megatron_snip.reporting.figures.divergence import divergence_maps

    with WIDE.style():
        yield _opaque(divergence_maps(WIDE, record), WIDE.theme.surface)


def _can_draw() -> bool:
    if find_spec("matplotlib") is not None:
        return True
    warn_once(logger, "no pictures are logged: pip install 'megatron-snip[report]' for matplotlib")
    return False


def _opaque(figure: Any, color: str) -> Any:
    figure.set_facecolor(color)  # dark pages of W&B would show through
    return figure
