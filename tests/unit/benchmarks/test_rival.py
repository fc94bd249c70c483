"""The runs against norms: their order, what they resume from, and the verdict."""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.compare import rival
from benchmarks.compare.policies import run_branches
from benchmarks.compare.rival import FORMATS, NORMS, SCHEDULE, SNIP, TARGETS
from benchmarks.compare.store import KEY, ResultStore
from benchmarks.machine import append_row, read_rows
from tests.unit.divergence.build import errors, linear, table


class FakeModel:
    """A warm model whose branches take no time; a loss is that of the plan's digest."""

    def __init__(self, digest: str = "a") -> None:
        self.digest = digest
        self.trained: list[Any] = []

    def measure(self, formats: tuple[str, ...]) -> Any:
        size = 16.0 + len(self.trained)  # a branch changes the weights
        rows = (linear(k, **{formats[0]: errors(1.0 + k), formats[1]: errors(size - k)})
                for k in range(4))  # fmt: skip
        return table(*rows)

    def branch(
        self, plans: Sequence[Any], data_seed: int, remake: Callable[[], Any] | None = None
    ) -> dict[str, Any]:
        self.trained.append(plans)
        if remake is not None:
            plans = remake()
        loss = 2.0 + len(self.trained) / 64
        return {"loss": loss, "loss_bf16": loss, "training_loss": loss, "quarters": [], "tokens": 1}


def keys_of(step: rival.Step, setup: str = "deep", seed: int = 0) -> list[dict[str, Any]]:
    return step.keys(setup, seed)


def test_the_schedule_has_each_pair_first_and_balanced_over_seeds() -> None:
    seen = [(step, setup, seed) for step, setup, seed in rival.blocks()]
    first = [(setup, seed) for step, setup, seed in seen if step is SCHEDULE[0]]
    assert [seed for _, seed in first] == sorted(seed for _, seed in first)
    counts = Counter(setup for setup, _ in first)
    assert counts == dict.fromkeys(rival.SETUPS_OF_TEST, 6)
    for step in SCHEDULE:
        keys = [tuple(key.get(k) for k in KEY) for key in keys_of(step)]
        assert len(set(keys)) == len(keys)
        assert sum(key["variant"] == "bf16" for key in keys_of(step)) == len(step.formats)
        assert {SNIP, NORMS} <= {key["variant"] for key in keys_of(step)}


def test_equal_plans_are_trained_once_and_rows_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "rival.jsonl"
    store, model = ResultStore(path, blind=True), FakeModel()
    keys = keys_of(SCHEDULE[1])
    run_branches(store, model, keys)  # type: ignore[arg-type]
    rows = ResultStore(path).rows
    assert [tuple(row[k] for k in KEY) for row in rows] == [tuple(k[x] for x in KEY) for k in keys]
    plans = [row["plan"] for row in rows]
    assert len(model.trained) == len(set(plans)) < len(plans)
    for row in rows:
        same = [other for other in rows if other["plan"] == row["plan"]]
        assert {other["loss"] for other in same} == {row["loss"]}
        assert (row is same[0]) == ("equal_to" not in row)
    # Plans were made before any branch: another model that trains nothing has the same ones.
    again = ResultStore(tmp_path / "again.jsonl", blind=True)
    run_branches(again, FakeModel(), keys[-3:])  # type: ignore[arg-type]
    assert [row["plan"] for row in again.rows] == plans[-3:]


def test_a_plan_that_follows_the_run_is_made_from_its_second_measurement(tmp_path: Path) -> None:
    store, model = ResultStore(tmp_path / "rows.jsonl", blind=True), FakeModel()
    keys = [key for key in keys_of(SCHEDULE[2]) if "replan" in key["variant"]]
    run_branches(store, model, keys)  # type: ignore[arg-type]
    assert len(model.trained) == len(keys) == 4
    assert all(row["plan"] is None and len(row["plans"]) == 2 for row in store.rows)


@pytest.fixture
def options() -> argparse.Namespace:
    return argparse.Namespace(hours=1.0, checkpoints=None)


def test_the_run_resumes_and_another_machine_makes_its_own_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: argparse.Namespace
) -> None:
    step = rival.Step(("deep",), rival.PAIR, seeds=range(2))
    monkeypatch.setattr(rival, "SCHEDULE", (step,))
    opened: list[tuple[str, FakeModel]] = []
    digests = iter("abcdef")

    @contextmanager
    def fake(setup: Any, seed: int, *_: Any) -> Iterator[FakeModel]:
        opened.append((f"{seed}", FakeModel(next(digests))))
        yield opened[-1][1]

    monkeypatch.setattr(rival, "warm_model", fake)
    path = tmp_path / "rival.jsonl"
    rival.run_rival(ResultStore(path), argparse.Namespace(hours=0.0, checkpoints=None))
    assert not opened
    rival.run_rival(ResultStore(path), options)
    assert [seed for seed, _ in opened] == ["0", "1"]
    num_rows = len(read_rows(path))
    assert num_rows == 2 * len(step.keys("deep", 0))
    rival.run_rival(ResultStore(path), options)
    assert len(opened) == 2  # complete seeds need no warm model
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + '\n{"kind":"riv')  # killed
    rival.run_rival(ResultStore(path), options)
    assert [seed for seed, _ in opened[2:]] == ["1"]
    # Digest "c": the warm model has other bits, and seed 1 is made again for it.
    assert len(read_rows(path)) == num_rows - 1 + len(step.keys("deep", 1))


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
            for key in SCHEDULE[0].keys(setup, seed):
                loss = 2.0
                if key["variant"] == NORMS:
                    loss += (mean[key["low"]] + spread * rng.standard_normal()) / 1e3
                losses = {"loss": loss, "loss_bf16": loss}
                rows.append({**key, "start": "a", "plan": key["variant"], **losses})
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


def test_the_command_prints_no_loss_of_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ResultStore(tmp_path / "rows.jsonl", blind=True)
    run_branches(store, FakeModel(), keys_of(SCHEDULE[0])[:2])  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    assert shown.count("rival deep plain") == 2 and "2.0" not in shown
    assert "loss" in json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[1])
