"""A comparison's tables as Markdown, for people and for documentation, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from megatron_snip.comparison.contender import BASELINE
from megatron_snip.comparison.settings import ComparisonConfig
from megatron_snip.comparison.spread import Spread
from megatron_snip.comparison.table import DIVERGED, RIVAL, YARDSTICK, Calibration, Row, Table
from megatron_snip.reporting.provenance import commit, machine

VERSION = 1

LEGEND = f"""\
Losses in nats. Gaps in thousandths of a nat, mean +- standard deviation over seeds: `gap` of the
held-out loss at the end to BF16's, `training gap` of the training loss over all steps, `over
{RIVAL}` of the held-out loss to that contender's; all are differences of runs on the same samples
from the same weights. `of {YARDSTICK}`: gap over that contender's. `diverged`: steps whose loss is
not finite or more than {DIVERGED} above BF16's. Step times are predicted, over BF16's: Hopper's and
Blackwell's from published GEMM rates for Llama's 70B shape, a calibrated device's from its own
measured seconds, scaled by FLOPs to the linears trained here.
"""

Columns = tuple[tuple[str, ...], ...]


def markdown(tables: Sequence[Table]) -> str:
    """Return all tables with what their columns mean."""
    parts = [LEGEND]
    for table in tables:
        head, *rows = columns(table)
        lines = [head, tuple("---" if k == 0 else "---:" for k in range(len(head))), *rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"### {table.title}\n\n{body}\n")
    return "\n".join(parts)


def columns(table: Table) -> Columns:
    """Return a table's cells as text, headings first."""
    devices = list(table.rows[0].step_time) if table.rows else []
    head = (
        "policy",
        "seeds",
        f"{table.lowest} FLOPs",
        "validation loss",
        "gap",
        "gap, %",
        "training gap",
        f"over {RIVAL}",
        f"of {YARDSTICK}",
        "diverged",
        *(f"step, {name}" for name in devices),
    )
    return (head, *(_cells(row) for row in table.rows))


def to_json(
    tables: Sequence[Table], config: ComparisonConfig, calibration: Calibration | None = None
) -> dict[str, Any]:
    """Return tables, settings, machine and commit as plain types; not finite becomes None.

    With a calibration, also where its seconds come from.
    """
    settings = config.model_dump(mode="json", exclude={"output", "jobs", "threads", "calibration"})
    plain = [{"title": t.title, **dataclasses.asdict(t)} for t in tables]
    made = {"machine": machine(), "commit": commit()}
    value = {**made, "version": VERSION, "settings": settings, "tables": plain}
    if calibration is not None:
        value["calibration"] = calibration.table.model_dump(mode="json", exclude={"linears"})
    result: dict[str, Any] = _nulled(value)
    return result


def _cells(row: Row) -> tuple[str, ...]:
    own = row.contender == BASELINE
    return (
        row.contender,
        str(row.seeds),
        f"{100 * row.lowest_fraction:.1f} %",
        _number(row.validation.mean, ".4f"),
        "" if own else _thousandths(row.gap),
        "" if own else _number(100 * row.relative_gap, ".2f"),
        "" if own else _thousandths(row.training_gap),
        "" if row.contender == RIVAL else _thousandths(row.over_rival),
        "" if own else _number(row.share_of_yardstick, ".2f"),
        str(row.diverged_steps),
        *(_number(time, ".2f") for time in row.step_time.values()),
    )


def _thousandths(spread: Spread) -> str:
    if spread.count == 0:
        return ""
    if math.isnan(spread.mean):
        return "nan"
    mean = f"{1e3 * spread.mean:+.1f}"
    return mean if math.isnan(spread.deviation) else f"{mean} +- {1e3 * spread.deviation:.1f}"


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def _nulled(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _nulled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nulled(item) for item in value]
    return value
