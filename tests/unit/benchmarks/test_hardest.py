"""All policies in the hardest cell: the branches continue the cell's own run, and the verdict."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.compare import collapse, hardest
from benchmarks.compare.collapse import CELLS, Cell
from benchmarks.compare.hardest import BASELINES, PAPER, SEEDS, TARGETS, VARIANTS, keys_of
from benchmarks.compare.store import ResultStore
from benchmarks.lab import Lab
from benchmarks.machine import append_row
from megatron_snip.errors import SnipError, UsageError
from megatron_snip.options import Option

TINY = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "lr_warmup_iters": 1}
CELL = Cell({**TINY, "lr": 5e-3}, 6, hot=4.0, low="fp4_nearest")


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """The screening found CELL; its BF16 row is that of its run."""
    monkeypatch.setitem(CELLS, "tiny", CELL)
    monkeypatch.setattr(collapse, "HELD_OUT", 2)
    monkeypatch.setattr(hardest, "RESULTS", tmp_path)
    monkeypatch.setattr(hardest, "SEEDS", range(1))
    monkeypatch.setattr(hardest, "VARIANTS", (PAPER, "random", "replan"))
    for variant, loss in (("bf16", 2.0), ("fp8", 2.01), (CELL.low, 2.2)):
        append_row(
            tmp_path / "collapse.jsonl",
            {"setup": "tiny", "variant": f"uniform-{variant}", "loss": loss},
        )
    return CELL


def test_branches_continue_the_run_of_the_cell(cell: Cell, tmp_path: Path) -> None:
    path = tmp_path / "hardest.jsonl"
    hardest.run_hardest(ResultStore(path), argparse.Namespace(hours=0.0, checkpoints=None))
    assert not path.exists()
    options = argparse.Namespace(hours=1.0, checkpoints=None)
    hardest.run_hardest(ResultStore(path, blind=True), options)
    rows = {(row["variant"], row["target"]): row for row in ResultStore(path).rows}
    assert list(rows) == [
        ("bf16", 0.0),
        ("uniform-fp8", 0.0),
        ("uniform-fp4_nearest", 0.0),
        *((variant, target) for target in TARGETS for variant in (PAPER, "random", "replan")),
    ]
    with collapse.extra_formats():
        alone = collapse.run(cell, "bf16")
    # The copy at the checkpoint, the schedule of rates and the order of the data: bitwise.
    assert rows["bf16", 0.0]["loss"] == alone["loss"]
    assert rows["uniform-fp4_nearest", 0.0]["share"] == 1.0
    for target in TARGETS:
        assert rows["random", target]["share"] == pytest.approx(target, abs=0.04)
        assert rows[PAPER, target]["share"] >= rows["random", target]["share"] - 1e-4
        assert len(rows["replan", target]["plans"]) == 2
    first = path.read_text()
    hardest.run_hardest(ResultStore(path), options)
    assert path.read_text() == first


def test_a_branch_that_diverges_has_no_loss_and_the_next_one_is_as_without_it(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardest, "VARIANTS", ("random",))
    options = argparse.Namespace(hours=1.0, checkpoints=None)
    hardest.run_hardest(ResultStore(tmp_path / "all.jsonl"), options)
    train = Lab.train

    def fail(lab: Lab, steps: int, plan: Any = None) -> list[float]:
        losses = train(lab, steps, plan)
        if lab.step == 5 and plan and set(plan.values()) == {Option.uniform("fp8")}:
            raise SnipError("iteration 5: the gradient norm is nan")
        return losses

    monkeypatch.setattr(Lab, "train", fail)
    hardest.run_hardest(ResultStore(tmp_path / "some.jsonl"), options)
    rows = [ResultStore(tmp_path / f"{name}.jsonl").rows for name in ("all", "some")]
    assert rows[1][1]["loss"] is None and rows[1][1]["tokens"] == 2 * 1024
    losses = [[row["loss"] for row in part if row["variant"] != "uniform-fp8"] for part in rows]
    assert losses[0] == losses[1]


def test_a_screening_without_a_hard_cell_has_no_second_stage() -> None:
    with pytest.raises(UsageError, match="no cell of the screening is hard"):
        hardest.cell_of([], [])
    assert hardest.cell_of([{"setup": "deep"}], []) == "deep"  # the rows keep their cell


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


def test_no_loss_is_shown_before_all_rows_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of({})
    text = hardest.hardest_report(rows[:-1])
    assert text == f"deep: {len(rows) - 1} of {len(rows)} rows; losses are shown when all are made"
    assert len(rows) == 6 * (3 + 2 * len(VARIANTS))
    ResultStore(tmp_path / "rows.jsonl", blind=True).add(rows[5])
    assert "2.0" not in capsys.readouterr().out
    assert "loss" in json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[1])
