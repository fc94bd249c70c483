"""Delayed scaling of simulated linears: what is noted, when, and what leaves no trace.

That every number is Transformer Engine's is tested in tests/te/test_te_delayed_scaling.py, and
ranks in tests/distributed/test_delayed_scaling.py.
"""

import base64

import pytest
import torch
from torch import Tensor

from megatron_snip.errors import UsageError
from megatron_snip.formats import get_format
from megatron_snip.options import Option
from megatron_snip.quantizers.quantize import quantize_dequantize_operand
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Topology
from megatron_snip.types import Gemm, Operand
from tests.unit.linears.delayed_job import DELAYED, HYBRID, PLACEMENT, Job


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def test_scales_are_those_of_earlier_microbatches() -> None:
    job = Job()
    weight_amax = job.module.weight.detach().abs().max()
    assert job.scales().tolist() == [1.0, 1.0, 1.0]
    x, y = job.forward(100.0)
    q = quantize_dequantize_operand(
        x.detach(), DELAYED, Operand.INPUT, Gemm.FPROP, amax_or_scale=torch.tensor(1.0)
    )
    w = quantize_dequantize_operand(
        job.module.weight.detach(),
        DELAYED,
        Operand.WEIGHT,
        Gemm.FPROP,
        amax_or_scale=torch.tensor(1.0),
    )
    torch.testing.assert_close(y, q @ w.t())
    job.step(1, 4.0, 2.0)
    wanted = torch.stack([torch.tensor(2.0), weight_amax, torch.tensor(2.0)])
    assert torch.equal(job.scales(), torch.full((3,), 448.0) / wanted)


def test_the_history_holds_the_largest_of_its_microbatches() -> None:
    job = Job(length=3, algorithm="max")
    for iteration, (size, largest) in enumerate([(8.0, 8.0), (1.0, 8.0), (2.0, 8.0), (1.0, 2.0)]):
        job.step(iteration, size)
        assert job.scales()[0] == 448.0 / largest


def test_gradients_of_a_hybrid_format_have_another_range() -> None:
    job = Job()
    job.step(1, 2.0)
    job.linear.option = Option.uniform("fp8_delayed_hybrid")
    with torch.no_grad():
        job.forward(1.0)
    read = job.linear.delayed_scales(PLACEMENT)
    assert read is not None
    assert (read(HYBRID) / read(DELAYED)).tolist() == [1.0, 1.0, 128.0]


def test_an_evaluation_and_a_repeated_iteration_leave_no_trace() -> None:
    job, other = Job(length=3, algorithm="max"), Job(length=3, algorithm="max")
    for iteration, size in enumerate([1.0, 5.0, 3.0]):
        other.step(iteration, 1e4, torch.inf)  # undone by the guard, or repeated by Megatron
        assert equal(job.step(iteration, size, 2.0), other.step(iteration, size, 2.0))
        with torch.no_grad():
            other.forward(1e6)
        assert job.state() == other.state()


def test_a_pass_that_starts_anew_has_forgotten_what_it_did() -> None:
    job, other = Job(), Job()
    wanted = job.step(1, 2.0)
    with other.runtime.training_pass(1):
        other.forward(50.0)
        other.runtime.restart_pass()
        x, y = other.forward(2.0)
        y.backward(torch.full_like(y, 2.0))
    assert x.grad is not None and equal([y, x.grad], wanted)
    assert job.state() == other.state()


@pytest.mark.usefixtures("megatron")
def test_a_recomputed_forward_has_the_scales_of_its_microbatch() -> None:
    """Two forwards, then two backwards, as in a pipeline."""

    def results(recomputes: bool) -> list[Tensor]:
        job = Job(length=2, algorithm="max")
        found = []
        for iteration in range(3):
            with job.runtime.training_pass(iteration):
                calls = [job.forward(size, recomputes) for size in (1.0 + iteration, 9.0, 0.5)]
                for x, y in calls:
                    y.backward(torch.full_like(y, 0.1 + iteration))
                    assert x.grad is not None
                    found += [y.detach(), x.grad]
            found.append(job.scales())
        assert job.module.weight.grad is not None
        return [*found, job.module.weight.grad]

    assert equal(results(True), results(False))


def test_a_linear_is_measured_with_its_own_scales() -> None:
    """X and G have grown by a factor of 100, and saturate."""
    job = Job()
    job.step(1, 1.0)
    formats = {name: get_format(name) for name in ("fp8_delayed", "fp8_tensorwise")}
    observer = StepObserver(MeasureSettings(formats, 2, 0, all_tokens=True), Topology(), {})
    with job.runtime.observed_by(observer):
        job.step(2, 100.0)
    table, _ = observer.table([PLACEMENT.info], 1.0, None)
    (row,) = table.linears
    delayed = row.formats["fp8_delayed"]
    current = row.formats["fp8_tensorwise"]
    assert delayed.weight_error_square == pytest.approx(current.weight_error_square, rel=0.2)
    assert delayed.input_error_square > 1e3 * current.input_error_square
    assert delayed.grad_error_square > 1e3 * current.grad_error_square
    unplanned = Job()
    unplanned.linear.option = Option.uniform("fp8_tensorwise")
    observer = StepObserver(MeasureSettings(formats, 2, 0, all_tokens=True), Topology(), {})
    with unplanned.runtime.observed_by(observer):
        unplanned.step(2, 100.0)
    (row,) = observer.table([PLACEMENT.info], 1.0, None)[0].linears
    assert row.formats["fp8_delayed"] == row.formats["fp8_tensorwise"]


def test_it_has_one_format_for_all_gemms() -> None:
    linear = Job().linear
    assert linear.refusal(Option.uniform("fp8_delayed")) is None
    assert linear.refusal(Option.parse("fp4-fp4-bf16")) is None
    text = "fp8_delayed-fp8_delayed-bf16"
    refused = "fp8_delayed takes one recipe for all three GEMMs of a linear"
    assert linear.refusal(Option.parse(text)) == f"{text}: {refused}"


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_another_length_of_the_history_keeps_the_newest(length: int) -> None:
    first = Job(length=3, algorithm="max")
    for iteration, size in enumerate([16.0, 4.0, 2.0]):
        first.step(iteration, size)
    second = Job(length, algorithm="max")
    second.runtime.delayed.load_state_dict(first.state())
    assert second.state() == first.state()  # also before the first forward
    assert second.scales()[0] == first.scales()[0] == 448.0 / 16.0
    second.step(3, 1.0)
    kept = {1: 1.0, 2: 2.0, 3: 4.0, 5: 4.0}
    assert second.scales()[0] == 448.0 / kept[length]


@pytest.mark.parametrize("text", ["%", base64.b64encode(bytes(12)).decode(), "AAAA"])
def test_a_damaged_state_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"delayed_scaling: a\.b: .*; load another checkpoint"):
        Job().runtime.delayed.load_state_dict({"a.b": text})
