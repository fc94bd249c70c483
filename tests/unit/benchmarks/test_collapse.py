"""The screening of FP4: what a cell changes, resuming, and the criterion."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.compare import collapse
from benchmarks.compare.collapse import CELLS, Cell, findings, hardest
from benchmarks.compare.store import ResultStore
from benchmarks.lab import Lab, open_lab
from megatron_snip.errors import SnipError
from megatron_snip.formats import FORMATS

TINY = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "lr_warmup_iters": 1}


def test_hot_channels_change_activations_and_not_the_function() -> None:
    with open_lab({**TINY, "train_iters": 4}) as lab:
        batches = lab.microbatches(1)
        before = lab.losses(batches)
        assert collapse._hottest(lab) == pytest.approx(1.0)
        collapse.make_hot(lab, 16.0)  # a power of two: BF16 rounds alike
        np.testing.assert_allclose(lab.losses(batches), before, rtol=2e-3)
        assert collapse._hottest(lab) == pytest.approx(16.0)
        lab.train(2)  # the optimizer's own weights are hot as well
        assert collapse._hottest(lab) > 15.0


def test_a_cell_is_trained_in_each_recipe_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = {"one": Cell(TINY, 3, hot=4.0, low="fp4_nearest"), "two": Cell(TINY, 2)}
    monkeypatch.setattr(collapse, "CELLS", cells)
    monkeypatch.setattr(collapse, "HELD_OUT", 2)
    path, known = tmp_path / "rows.jsonl", dict(FORMATS)
    options = argparse.Namespace(hours=1.0)
    collapse.run_collapse(ResultStore(path), argparse.Namespace(hours=0.0))
    assert not path.exists()
    collapse.run_collapse(ResultStore(path), options)
    first = path.read_text()
    rows = ResultStore(path).rows
    assert [(row["setup"], row["variant"], row["iterations"]) for row in rows] == [
        ("one", "uniform-bf16", 3),
        ("one", "uniform-fp8", 3),
        ("one", "uniform-fp4_nearest", 3),
        ("two", "uniform-bf16", 2),
        ("two", "uniform-fp8", 2),
        ("two", "uniform-fp4", 2),
    ]
    assert len({row["loss"] for row in rows}) == 6
    assert rows[0]["loss"] == rows[0]["loss_bf16"]
    collapse.run_collapse(ResultStore(path), options)
    assert path.read_text() == first and known == FORMATS


def test_a_run_that_diverges_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse, "HELD_OUT", 1)
    train = Lab.train

    def fail(lab: Lab, steps: int, options: Any = None) -> list[float]:
        if lab.step == 2:
            raise SnipError("iteration 3: loss is nan")
        return train(lab, steps, options)

    monkeypatch.setattr(Lab, "train", fail)
    found = collapse.run(Cell(TINY, 4), "fp8")
    assert (found["iterations"], found["loss"], found["loss_bf16"]) == (2, None, None)
    assert found["training_loss"] > 0


def rows_of(cell: str, fp8: float | None, low: float | None) -> list[dict[str, Any]]:
    losses = {"bf16": 2.0, "fp8": fp8, CELLS[cell].low: low}
    return [{"setup": cell, "variant": f"uniform-{k}", "loss": v} for k, v in losses.items()]


def test_the_hardest_cell_is_one_that_fp8_can_train() -> None:
    rows = [*rows_of("base", 2.001, 2.03), *rows_of("hot-10", 2.002, 2.2)]
    rows += [*rows_of("hot-30", 2.6, None), *rows_of("deep", 2.0, 2.1)]
    rows += rows_of("rate-16", 2.0, 2.9)[:2]  # a row is missing
    found = findings(rows)
    assert [name for name, each in found.items() if each.is_hard] == ["hot-10", "hot-30", "deep"]
    assert not found["hot-30"].can_be_planned
    assert hardest(found) == "hot-10"
    assert hardest(findings(rows_of("base", 2.0, 2.03))) is None
    assert hardest(findings([*rows, *rows_of("long", 2.01, 2.6)])) == "long"  # it diverged
    text = collapse.collapse_report(rows)
    assert f"4 of {len(CELLS)} cells; hardest: hot-10" in text
    assert "| hot-30 | diverged | diverged | yes, and FP8 as well |" in text
