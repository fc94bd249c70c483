"""Statistics that plugins add: what their definition says, and what a mistake in one does."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_snip.log import forget_warnings
from megatron_snip.statistics import added
from megatron_snip.statistics.added import Statistic
from megatron_snip.statistics.operands import MEASURED_IN
from megatron_snip.statistics.records import StatisticsTable, named_statistics, running_mean
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Topology
from megatron_snip.types import Operand
from tests.unit.statistics.equations import FORMATS, SEED, STEP, Toy, row_of

SCALE = 0.125


def differences(x: Tensor, quantized: Tensor) -> Tensor:
    return (x - quantized).abs().sum()


def largest(x: Tensor, quantized: Tensor) -> Tensor:
    return (x + quantized).max()


def measured(toy: Toy, grad_scale: float = 1.0, **entries: Statistic) -> StatisticsTable:
    settings = MeasureSettings(FORMATS, STEP, SEED, all_tokens=True, added=entries)
    return toy.observed(Topology(), settings, grad_scale=grad_scale)


@pytest.mark.parametrize("operand", Operand)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_sums_and_maxima_are_what_their_definition_says(kind: str, operand: Operand) -> None:
    """Against the operands, quantized again, in FP64."""
    toy = Toy.make(kind)
    power = int(operand is Operand.GRAD_OUTPUT)
    found = measured(
        toy,
        SCALE,
        total=Statistic(operand, differences, grad_power=power),
        most=Statistic(operand, largest, "max", grad_power=power),
    )
    tensors = {Operand.INPUT: toy.inputs, Operand.GRAD_OUTPUT: toy.grads}
    originals = tensors.get(operand, [toy.weight] * len(toy.inputs))
    (linear,) = found.linears
    for fmt in FORMATS:
        total, most = 0.0, -float("inf")
        for microbatch, original in enumerate(originals):
            x = original.double().numpy()
            quantized = toy.quantized(original, fmt, operand, MEASURED_IN[operand], microbatch)
            total += abs(x - quantized).sum()
            most = max(most, (x + quantized).max())
        if operand is Operand.WEIGHT:
            total /= len(originals)
        factor = SCALE if operand is Operand.GRAD_OUTPUT else 1.0
        wanted = {"total": total * factor, "most": most * factor}
        assert linear.formats[fmt].added == pytest.approx(wanted, rel=2e-5)
        assert named_statistics(linear)[f"{fmt}.total"] == linear.formats[fmt].added["total"]


def raises(x: Tensor, quantized: Tensor) -> Tensor:
    raise ZeroDivisionError("by\nnothing")


MISTAKES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str | None]] = {
    "raises": (raises, "ZeroDivisionError: by nothing"),
    "is no number": (lambda x, quantized: "text", "TypeError"),
    "is a tensor of many": (lambda x, quantized: x, "RuntimeError: shape"),
    "is not finite": (lambda x, quantized: x.sum() / 0, None),
    "is a NaN": (lambda x, quantized: x.sum() * torch.nan, None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_plugin_leaves_out_its_statistic_and_nothing_else(
    mistake: str, caplog: pytest.LogCaptureFixture
) -> None:
    measure, reason = MISTAKES[mistake]
    forget_warnings()
    toy = Toy.make("column")
    plain = row_of(measured(toy))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            table = measured(
                toy,
                ours=Statistic(Operand.INPUT, measure),
                most=Statistic(Operand.WEIGHT, measure, "max"),
                good=Statistic(Operand.INPUT, differences),
            )
    (linear,) = table.linears
    assert all(list(linear.formats[fmt].added) == ["good"] for fmt in FORMATS)
    found = row_of(table)
    assert {name: found[name] for name in plain} == plain
    failures = [record for record in caplog.records if record.exc_info]
    assert len(failures) == (0 if reason is None else 2)
    assert all(f"of a plugin failed: {reason}" in each.getMessage() for each in failures)
    lines = [record.getMessage() for record in caplog.records if record not in failures]
    assert len(lines) == (0 if reason is None else 2)  # of a statistic once, of two statistics
    for line, name in zip(lines, ("ours", "most"), strict=False):
        assert line.startswith(f"statistic '{name}' is left out where its plugin failed")
        assert f"{reason}" in line and line.endswith("(on rank 0)") and "\n" not in line


def test_a_name_of_snip_s_own_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entries = dict.fromkeys(
        ("ours", "input_error_square", "also"), Statistic(Operand.INPUT, differences)
    )
    monkeypatch.setattr(added, "STATISTICS", entries)
    forget_warnings()
    for _ in range(2):
        assert list(MeasureSettings(FORMATS, STEP, SEED).added) == ["also", "ours"]
    (record,) = caplog.records
    assert "statistic 'input_error_square' of a plugin is left out" in record.getMessage()


def test_they_are_averaged_and_kept_like_others() -> None:
    toy = Toy.make("row")
    first = measured(toy, ours=Statistic(Operand.INPUT, differences))
    double = Statistic(Operand.INPUT, lambda x, quantized: 3 * differences(x, quantized))
    second = measured(toy, ours=double, new=double)
    mean = running_mean(first, second, 0.5)
    assert StatisticsTable.from_dict(mean.to_dict()) == mean
    for fmt in FORMATS:
        before, now, both = (t.linears[0].formats[fmt].added for t in (first, second, mean))
        assert both["ours"] == pytest.approx((before["ours"] + now["ours"]) / 2)
        assert both["new"] == now["new"]
    without = running_mean(mean, measured(toy), 0.5)
    assert without.linears[0].formats["fp4"].added == {}
