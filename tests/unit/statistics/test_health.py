"""Health against its definitions in docs/glossary.md, in NumPy."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_snip.formats import get_format
from megatron_snip.options import BF16, Option
from megatron_snip.quantizers.quantize import quantize_dequantize
from megatron_snip.quantizers.reference import amax_of
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.statistics.gradients import gradient_norms
from megatron_snip.statistics.health_table import MEANINGS, HealthTable, LinearHealth
from megatron_snip.statistics.measure import operand_sums
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.operands import AmaxesOrScales, Operands
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Topology
from megatron_snip.types import Operand
from tests.unit.statistics import equations
from tests.unit.statistics.equations import SEED, STEP, Toy
from tests.unit.statistics.health_definitions import check_health

STREAM = StochasticStream(StreamKey(SEED, "linear", STEP, 0))


@pytest.mark.parametrize("formats", [("fp8", "fp4"), ("mxfp4", "nvfp4")])
@pytest.mark.parametrize(("kind", "grad_scale"), [("column", 1.0), ("row", 0.125)])
def test_every_value_is_what_its_definition_says(
    monkeypatch: pytest.MonkeyPatch, kind: str, grad_scale: float, formats: tuple[str, ...]
) -> None:
    """The tokens of the toy have magnitudes from 2^-40 to 2^8, and some elements are zero."""
    table = {
        # The transform is wgrad's alone, and health is of fprop's and dgrad's tiles.
        name: replace(get_format(name), wgrad_hadamard=0)
        for name in formats
    }
    monkeypatch.setattr(equations, "FORMATS", table)
    toy = Toy.make(kind, microbatches=1 if "nvfp4" in formats else 2)
    for tensor in (*toy.inputs, *toy.grads, toy.weight):
        tensor *= torch.exp2(torch.linspace(-40.0, 8.0, len(tensor)))[:, None]
        tensor[3, 5:200] = 0.0
    settings = MeasureSettings(table, STEP, SEED, all_tokens=True)
    toy.observed(Topology(), settings, grad_scale=grad_scale)
    assert toy.health is not None
    (row,) = toy.health.to_dict()["linears"]
    check_health(row, toy, grad_scale)
    assert HealthTable.from_dict(toy.health.to_dict()) == toy.health


def test_the_worst_expert_is_the_worst_of_experts_measured_alone() -> None:
    toys = {expert: Toy.make("column", microbatches=2) for expert in (1, 3)}
    for part in (*toys[3].inputs, *toys[3].grads, toys[3].weight):
        part *= torch.exp2(torch.linspace(-30.0, 0.0, part.shape[1]))  # underflows in every tile
    settings = MeasureSettings(equations.FORMATS, STEP, SEED, all_tokens=True)
    observer = StepObserver(settings, Topology())
    alone: dict[int, LinearHealth] = {}
    for expert, toy in toys.items():
        toy.observed(Topology(), settings)
        assert toy.health is not None
        (alone[expert],) = toy.health.linears
        place = replace(toy.placement(Topology()), expert=expert)
        for x, g in zip(toy.inputs, toy.grads, strict=True):
            weight = toy.weight.clone().requires_grad_()
            observer.observe(place, x, weight, torch.nn.functional.linear(x, weight)).backward(g)
    _, health = observer.table([toys[1].placement(Topology()).info], 1.0, None)
    (pooled,) = health.linears
    for name, operands in pooled.operands.items():
        for operand, found in operands.items():
            each = {expert: linear.operands[name][operand] for expert, linear in alone.items()}
            sqnr = min((h.sqnr_db, expert) for expert, h in each.items() if h.sqnr_db is not None)
            underflow = max((h.underflow or 0.0, expert) for expert, h in each.items())
            is_random = operand is Operand.GRAD_OUTPUT and name == "fp4"  # by expert
            near = {"rel": 0.1 if is_random else 1e-5}
            assert found.worst_expert["sqnr_db"] == (sqnr[1], pytest.approx(sqnr[0], **near))
            assert found.worst_expert["underflow"] == (3, pytest.approx(underflow[0], **near))
            mean = sum(h.underflow or 0.0 for h in each.values()) / 2
            assert found.underflow == pytest.approx(mean, **near)
    worst = health.findings("underflow", "fp4")[0]
    assert worst.tensor.endswith("of expert 3")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])
def test_zeros_of_a_tile_that_is_not_finite_do_not_hide_underflow(name: str, bad: float) -> None:
    """Q makes NaN of such a tile's zeros, too; E4M3 scales spread that over the tensor."""
    two_rows = torch.tensor([[1e-9] * 127 + [1.0], [0.0] * 127 + [bad]])
    fmt = get_format(name)
    amax = amax_of(two_rows)
    quantized = quantize_dequantize(two_rows, fmt, (1, fmt.tile), amax_or_scale=amax)
    rounded = replace(fmt, weight_block=(1, fmt.tile), stochastic_grad=False)
    known = AmaxesOrScales(amax.expand(3), {})
    found = operand_sums(Operands(two_rows, two_rows, two_rows, known), {name: rounded}, STREAM)
    assert (found.sums[:, 0, 1] == ((quantized == 0) & (two_rows != 0)).sum()).all()
    assert not found.amax.isfinite().any()


def test_a_tile_whose_scale_is_rounded_to_zero_underflows_and_does_not_saturate() -> None:
    """One outlier in a tensor that Transformer Engine quantizes to NVFP4."""
    fmt, x = get_format("nvfp4_2d_rht"), torch.full((2, 32), 1e-9)
    x[0, 0] = 1.0
    known = AmaxesOrScales(torch.ones(3), {})
    found = operand_sums(Operands(x, None, x, known), {"nvfp4": fmt}, STREAM)
    _, num_zeroed, num_saturated, *scales = found.sums[0, 0]
    assert (num_zeroed, num_saturated, sum(scales)) == (x.numel() - 1, 0, 1)


def test_a_tensor_that_vanishes_is_the_worst_and_one_without_underflow_is_not_listed() -> None:
    """Its error is as large as itself: 0 dB."""
    toy = Toy.make("column", microbatches=1)
    settings = MeasureSettings(equations.FORMATS, STEP, SEED, all_tokens=True)
    toy.observed(Topology(), settings)
    assert toy.health is not None
    (sound,) = toy.health.linears
    operands = {
        name: {operand: replace(found, sqnr_db=0.0, underflow=0.0)}
        for name, of_format in sound.operands.items()
        for operand, found in of_format.items()
    }
    table = replace(toy.health, linears=(sound, replace(sound, name="gone", operands=operands)))
    worst = {measure: [f for f in table.worst() if f.measure == measure] for measure in MEANINGS}
    assert worst["sqnr_db"][0].linear == "gone" and worst["sqnr_db"][0].value == 0.0
    assert all(each.value > 0 for each in worst["underflow"])


@pytest.mark.parametrize("num_experts", [0, 2])
@pytest.mark.parametrize("num_owners", [1, 3])
def test_the_gradient_norm_counts_each_element_once(num_experts: int, num_owners: int) -> None:
    """`--num-distributed-optimizer-instances` has several owners of each element."""
    toy = Toy.make("column", microbatches=1)
    settings = MeasureSettings(equations.FORMATS, STEP, SEED, all_tokens=True)
    observer = StepObserver(settings, Topology())
    place = toy.placement(Topology())
    x = toy.inputs[0]
    g = toy.grads[0]
    for expert in range(num_experts) or [None]:
        weight = toy.weight.clone().requires_grad_()
        output = torch.nn.functional.linear(x, weight)
        observer.observe(replace(place, expert=expert), x, weight, output).backward(g)
    num_elements = num_owners * max(1, num_experts) * toy.weight.numel()
    norms = {place.name: torch.tensor([9.0 * num_owners, num_elements], dtype=torch.float64)}
    _, health = observer.table([place.info], 1.0, None, lambda: norms)
    assert health.linears[0].gradient_norm == pytest.approx(3.0)


def test_gradient_noise_is_estimated_from_the_errors_of_x_and_g() -> None:
    """Two microbatches whose gradients almost cancel: the noise of both stays."""
    toy = Toy.make("column", microbatches=2)
    toy.inputs[1].copy_(toy.inputs[0])
    toy.grads[1].copy_(-0.99 * toy.grads[0])
    settings = MeasureSettings(equations.FORMATS, STEP, SEED, all_tokens=True)
    gradient = sum(g.T @ x for x, g in zip(toy.inputs, toy.grads, strict=True))
    assert isinstance(gradient, torch.Tensor)
    square = gradient.double().square().sum().item()
    norms = torch.tensor([square, gradient.numel()], dtype=torch.float64)
    place = toy.placement(Topology())
    observer = StepObserver(settings, Topology())
    for x, g in zip(toy.inputs, toy.grads, strict=True):
        weight = toy.weight.clone().requires_grad_()
        observer.observe(place, x, weight, torch.nn.functional.linear(x, weight)).backward(g)
    _, health = observer.table([place.info], 1.0, None, lambda: {place.name: norms})
    (linear,) = health.linears
    for name in equations.FORMATS:
        error = sum(float((toy.wgrad_error(name, m) ** 2).sum()) for m in range(2))
        wanted = math.sqrt(3 * error / norms[0].item())
        assert linear.gradient_noise[name] == pytest.approx(wanted, rel=0.35)
    above = health.beyond("gradient_noise", 1, 1.0)
    assert [(each.linear, each.tensor, each.format) for each in above] == [(place.name, "", "fp4")]


def test_the_gradient_noise_of_a_plan_is_that_of_its_formats_over_all_linears() -> None:
    def linear(name: str, norm: float | None, noise: dict[str, float | None]) -> LinearHealth:
        return LinearHealth(name, 0, norm, {}, {}, gradient_noise=noise)

    noises: dict[str, float | None] = {"fp8": 0.1, "fp4": 2.0}
    table = HealthTable(
        1, (linear("a", 3.0, noises), linear("b", 4.0, noises), linear("frozen", None, {}))
    )
    low = {name: Option.uniform("fp4") for name in ("a", "b", "frozen")}
    assert table.gradient_noise(low) == pytest.approx(2.0)
    assert table.gradient_noise({**low, "b": BF16}) == pytest.approx(2.0 * 3 / 5)
    mixed = {**low, "b": Option.parse("fp4-fp4-fp8")}
    assert table.gradient_noise(mixed) == pytest.approx(math.hypot(6.0, 0.4) / 5)
    assert table.gradient_noise({"frozen": BF16}) is None


@pytest.mark.parametrize("gradient", [None, torch.zeros(512, 256)])
def test_a_gradient_of_zero_is_a_norm_and_no_gradient_is_none(
    gradient: torch.Tensor | None,
) -> None:
    """So `--snip-alert 'gradient_norm<1e-9'` finds a linear that no longer learns."""
    toy = Toy.make("column", microbatches=1)
    settings = MeasureSettings(equations.FORMATS, STEP, SEED, all_tokens=True)
    observer = StepObserver(settings, Topology())
    place = toy.placement(Topology())
    weight = torch.nn.Parameter(toy.weight.clone())
    output = torch.nn.functional.linear(toy.inputs[0], weight)
    observer.observe(place, toy.inputs[0], weight, output).backward(0 * toy.grads[0])
    weight.grad = gradient
    optimizer = torch.optim.SGD([weight], lr=1.0)
    norms = partial(gradient_norms, {place: weight}, optimizer, Topology(), 1.0)
    _, health = observer.table([place.info], 1.0, None, norms)
    found = health.beyond("gradient_norm", -1, 1e-9)
    assert [each.value for each in found] == ([] if gradient is None else [0.0])


def test_an_alert_names_the_value_that_is_farthest_beyond_the_limit() -> None:
    """Also below a limit of a measure whose large values are bad."""
    amaxes = {"one": (3.0, 2.0, 9.0), "two": (4.0, 1.0, 8.0)}
    table = HealthTable(
        1,
        tuple(
            LinearHealth(name, 0, None, dict(zip(Operand, values, strict=True)), {})
            for name, values in amaxes.items()
        ),
    )
    below = table.beyond("amax", -1, 5.0)
    assert [(each.linear, each.value) for each in below] == [("two", 1.0), ("one", 2.0)]
    above = table.beyond("amax", 1, 2.5)
    assert [(each.linear, each.value) for each in above] == [("one", 9.0), ("two", 8.0)]
