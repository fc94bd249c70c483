"""The verdict on products against norms, and the committed rows of its runs."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.compare import rival
from benchmarks.compare.rival import FORMATS, NORMS, SNIP, TARGETS
from benchmarks.compare.store import ResultStore
from benchmarks.machine import RESULTS, append_row, read_rows


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, {"a": 1})
    append_row(path, {"a": 2})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"a":3,"b')
    assert [row["a"] for row in read_rows(path)] == [1, 2]
    append_row(path, {"a": 4})
    assert path.read_bytes() == whole + b'{"a":4}\n'
    assert [row["a"] for row in read_rows(path)] == [1, 2, 4]
    assert len([line for line in path.read_text().splitlines() if "command" in line]) == 1


def made_rows(mean: dict[str, float], spread: float = 0.3) -> list[dict[str, Any]]:
    """Rows of the primary test: norms lose more by `mean`, by format, in 1e-3 nat."""
    rng = np.random.default_rng(0)
    rows = []
    for setup in rival.SETUPS_OF_TEST:
        for seed in rival.SEEDS:
            place = {"setup": setup, "scenario": "plain", "seed": seed, "start": "a"}
            for low, target, variant in product(FORMATS, TARGETS, ("bf16", SNIP, NORMS)):
                loss = 2.0
                if variant == NORMS:
                    loss += (mean[low] + spread * rng.standard_normal()) / 1e3
                row = {**place, "low": low, "variant": variant, "plan": variant}
                row |= {"target": 0.0 if variant == "bf16" else target}
                rows.append({**row, "loss": loss, "loss_bf16": loss})
    return rows


@pytest.mark.parametrize(
    ("fp4", "fp3", "wanted"),
    [
        (0.0, 2.0, "snip"),
        (1.0, 0.0, "snip"),
        (0.0, 0.0, "equal"),
        (0.2, 0.3, "equal"),  # significant, and smaller than what matters
        (-1.0, 0.0, "norms"),
        (-1.0, 2.0, "undecided"),
    ],
)
def test_the_verdict(fp4: float, fp3: float, wanted: str) -> None:
    rows = made_rows({"fp4": fp4, "fp3": fp3})
    assert rival.verdict(rival.primary(rows)) == wanted
    assert rival.report(rows).startswith(f"verdict: {wanted}\n")


def test_noise_decides_nothing() -> None:
    assert rival.verdict(rival.primary(made_rows({"fp4": 0.4, "fp3": 0.8}, spread=9.0))) == (
        "undecided"
    )


def test_equal_plans_are_no_difference() -> None:
    rows = made_rows({"fp4": 0.0, "fp3": 0.0}, spread=0.0)
    assert rival.verdict(rival.primary(rows)) == "equal"


def test_no_loss_is_shown_before_the_primary_test_is_complete() -> None:
    rows = made_rows({"fp4": 0.5, "fp3": 0.5})
    complete = 2 * 6 * len(FORMATS)
    assert "verdict" in rival.report(rows)
    for lacking in (rows[:-1], [row for row in rows if row["target"] != TARGETS[1]], []):
        text = rival.report(lacking)
        assert "no losses are shown" in text and "+0" not in text
    assert f"{complete - 1} of {complete} differences" in rival.report(rows[:-1])


def test_the_verdict_of_the_committed_rows() -> None:
    assert rival.report(ResultStore(RESULTS / "rival.jsonl").rows).startswith("verdict: equal\n")
