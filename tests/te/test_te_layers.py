"""The benchmark of layers, dry: on a CPU all ways run, agree where they must, and are compared."""

import importlib.util
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks import layers
from benchmarks.layers import FROM_BF16, JOB, PER_GEMM, PLANNED
from tests.te_on_cpu import capability


@pytest.fixture(autouse=True)
def hopper() -> Any:
    """The GPU that was measured; it has blockwise FP8."""
    with ExitStack() as stack:
        stack.enter_context(capability.on((9, 0)))
        yield


def test_a_plan_of_all_fp8_is_compared_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.models, "SEQUENCE", 64)
    report = layers.fp8(1)
    assert report["failures"] == {}
    assert list(report["recipes"]) == ["tensorwise", "blockwise"]
    for found in report["recipes"].values():
        assert found["seconds"].keys() == {JOB, PLANNED, FROM_BF16}
        assert found["same_loss"] and found["loss"][FROM_BF16] == found["loss"][JOB]
        assert all(over["ratio"] > 0 for over in found["over_job"].values())
    assert [goal["name"] for goal in report["goals"]] == [
        f"{recipe}, {way} / {JOB}"
        for recipe in ("tensorwise", "blockwise")
        for way in (PLANNED, FROM_BF16)
    ]


def test_options_per_gemm_are_compared_with_thirds_of_options_per_linear() -> None:
    report = layers.gemms(1)
    assert report["failures"] == {} and report["over_thirds"].keys() == set(PER_GEMM)
    seconds = report["seconds"]
    for name, over in report["over_thirds"].items():
        wanted = sum(seconds[part] for part in name.split("-")) / 3
        assert over["ratio"] == pytest.approx(seconds[name] / wanted)
    losses = report["loss"]
    assert losses["fp8"] == losses["fp8-fp8-bf16"] != losses["bf16"] == losses["bf16-fp8-fp8"]


def test_a_way_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    build = layers.models.build

    def fail(**changes: Any) -> Any:
        if "fp8" not in changes:
            raise RuntimeError("out of memory")
        return build(**changes)

    monkeypatch.setattr(layers.models, "build", fail)
    monkeypatch.setattr(layers, "RECIPES", {"tensorwise": layers.RECIPES["tensorwise"]})
    report = layers.fp8(1)
    assert report["failures"] == {f"tensorwise, {FROM_BF16}": "RuntimeError: out of memory"}
    assert list(report["recipes"]["tensorwise"]["over_job"]) == [PLANNED]


@pytest.mark.skipif(
    not importlib.util.find_spec("nvdlfw_inspect"), reason="nvdlfw-inspect is not installed"
)
def test_statistics_of_the_other_tool_come_in_each_second_iteration() -> None:
    report = layers.inspect(2)
    assert report["failures"] == {} and report["seconds"].keys() == {"with statistics", "without"}
    # 0 is the model's first one. 1 has none, then each way is run once, and twice in turns.
    assert report["iterations_logged"] == [0, 2, 4, 6]
    assert report["values_logged"] % (4 * 16) == 0  # of 16 linears
