"""All policies in the hardest cell: the verdict."""

from typing import Any

import numpy as np

from benchmarks.compare import hardest
from benchmarks.compare.hardest import BASELINES, PAPER, SEEDS, VARIANTS, keys_of


def rows_of(gap: dict[str, float | None], spread: float = 0.002) -> list[dict[str, Any]]:
    """Rows of all seeds; `gap` is in nat, 0.01 where it has no variant."""
    rng = np.random.default_rng(0)
    rows = []
    for seed in SEEDS:
        for key in keys_of("deep", seed):
            value = 0.0 if key["variant"] == "bf16" else gap.get(key["variant"], 0.01)
            loss = None if value is None else 2.0 + value + spread * rng.standard_normal()
            rows.append({**key, "loss": loss, "loss_bf16": loss})
    return rows


def test_the_verdict() -> None:
    collapsed: dict[str, float | None] = dict.fromkeys(BASELINES[:3])
    text = hardest.hardest_report(rows_of(collapsed))
    assert f"- {PAPER} against the paper's baselines: reproduced" in text
    assert "| random | 0.75 | 6 | +500.0 ± 0.0 |" in text
    both: dict[str, float | None] = {**collapsed, PAPER: 0.1}
    assert hardest.verdict(rows_of(both)) == "in part"  # SNIP collapses too, by less
    assert hardest.verdict(rows_of(both), "snip-gemm") == "reproduced"
    assert hardest.verdict(rows_of(dict.fromkeys(BASELINES[:2]))) == "not reproduced"
    assert hardest.verdict(rows_of(dict.fromkeys(BASELINES, 0.02))) == "in part"
    assert hardest.verdict(rows_of(dict.fromkeys(BASELINES, 0.005))) == "not reproduced"
    assert hardest.verdict(rows_of({})) == "not reproduced"
    assert hardest.verdict(rows_of({}, spread=0.0)) == "not reproduced"


def test_no_loss_is_shown_before_all_rows_are_there() -> None:
    rows = rows_of({})
    text = hardest.hardest_report(rows[:-1])
    assert text == f"deep: {len(rows) - 1} of {len(rows)} rows; losses are shown when all are made"
    assert len(rows) == 6 * (3 + 2 * len(VARIANTS))
