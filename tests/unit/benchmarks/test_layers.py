"""The benchmark of layers without Transformer Engine: pairs, and whose iterations have statistics.

That its ways run is tested on Transformer Engine's own Python (tests/te/test_te_layers.py).
"""

from typing import Any

import pytest

from benchmarks import layers, timing


class Tool:
    """nvdlfw-inspect, as far as the benchmark calls it; statistics come in even iterations."""

    def __init__(self) -> None:
        self.iteration = 0

    def initialize_training_step(self, iteration: int) -> None:
        self.iteration = iteration

    def step(self) -> None:
        self.iteration += 1


@pytest.mark.parametrize("gpu", [False, True])
def test_iterations_with_statistics_are_timed_as_such(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """On a GPU each way is warmed twice, on a CPU once."""
    tool = Tool()
    made: list[int] = []

    def iterate() -> None:
        made.append(tool.iteration)
        tool.step()

    def timed(run: Any, gpu: bool, held_s: float) -> float:
        run()
        return float(made[-1])

    monkeypatch.setattr(layers, "has_gpu", lambda: gpu)
    monkeypatch.setattr(timing, "_timed", timed)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    times = layers._alternating(iterate, tool, 3)
    assert all(number % 2 == 0 for number in times.runs["with statistics"])
    assert all(number % 2 == 1 for number in times.runs["without"])
    assert len(times.runs["without"]) == 3


def test_a_ratio_is_the_median_of_pairs() -> None:
    found = layers.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0])
    assert found["ratio"] == 3.0 and found["interval"] == (2.0, 4.0)


def test_a_plan_of_all_fp8_has_a_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turns(ways: Any, rounds: int, num_layers: int) -> Any:
        runs = {name: [1.0 + 0.05 * k] * rounds for k, name in enumerate(ways)}
        seconds = {name: values[0] for name, values in runs.items()}
        return timing.Times(seconds, runs), {"loss": dict.fromkeys(ways, 2.0), "failures": {}}

    monkeypatch.setattr(layers, "in_turns", in_turns)
    report = layers.fp8(3)
    assert [goal["met"] for goal in report["goals"]] == [False] * 4
    assert report["recipes"]["tensorwise"]["same_loss"]
    assert report["goals"][0]["value"] == pytest.approx(1.05)
