"""A whole measurement of a small network, against explicit Jacobians and loss changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_snip.collectives import RemoteFailure
from megatron_snip.formats import FORMATS
from megatron_snip.quantizers import quantize_dequantize
from megatron_snip.statistics import recorder, refresh
from megatron_snip.statistics.measure import Operands, exact_output, fprop_error
from megatron_snip.statistics.probe import Comparer
from megatron_snip.statistics.recorder import Recorder
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.statistics.sensitivity import gather_sensitivity
from megatron_snip.topology import Topology
from tests.unit.statistics.network import MICROBATCHES, NAMES, TOKENS, Network

DRAWS = 40
TOLERANCE = 0.06
"""Of a mean over DRAWS sign draws; the estimates of one draw scatter by 8 to 16 % here."""


def draws(network: Network, **kwargs: Any) -> list[StatisticsTable]:
    return [network.measure(step, **kwargs) for step in range(DRAWS)]


def expected_changes(network: Network) -> list[tuple[float, float]]:
    """E sum_t |dG_t / eps|^2 and |dX_t / eps|^2 of each linear, from Jacobians and D."""
    inputs = network.refresh_inputs()
    found = gather_sensitivity(inputs.trained, network.optimizer, Topology())
    scales = [
        s.d.double() / s.update_square**0.5 for s in found.values() if s.update_square is not None
    ]
    assert len(scales) == 3
    totals = np.zeros((3, 2))
    for m in range(MICROBATCHES):
        for i, both in enumerate(network.jacobians(m)):
            for j, by_weight in enumerate(both):
                for jacobian, scale in zip(by_weight, scales, strict=True):
                    totals[i, j] += (jacobian * scale).square().sum().item()
    return [tuple(row) for row in totals.tolist()]  # type: ignore[misc]


@pytest.fixture(scope="module")
def network() -> Network:
    return Network.make(steps=5)


@pytest.fixture(scope="module")
def tables(network: Network) -> list[StatisticsTable]:
    return draws(network)


def mean_of(tables: list[StatisticsTable], linear: int, field: str) -> float:
    return float(np.mean([getattr(t.linears[linear], field) for t in tables]))


def test_the_probe_sees_every_weight_s_effect(
    network: Network, tables: list[StatisticsTable]
) -> None:
    for i, (grad, input_) in enumerate(expected_changes(network)):
        assert mean_of(tables, i, "probe_grad_square") == pytest.approx(grad, rel=TOLERANCE)
        assert mean_of(tables, i, "probe_input_square") == pytest.approx(input_, rel=TOLERANCE)
    assert tables[0].linears[0].probe_input_square == 0  # no weight is below the first linear


def test_a_sample_of_tokens_stands_for_all(network: Network) -> None:
    few = draws(network, rows=4)
    for i, (grad, _) in enumerate(expected_changes(network)):
        # 4 of 7 tokens: the sample scatters, too.
        assert mean_of(few, i, "probe_grad_square") == pytest.approx(grad, rel=3 * TOLERANCE)


def test_the_size_of_the_step_does_not_matter(network: Network) -> None:
    """Estimates are slopes: a tenth of the step gives the same, up to curvature."""
    large, small = network.measure(relative_step=1e-2), network.measure(relative_step=1e-3)
    assert large.probe_step == pytest.approx(10 * small.probe_step, rel=1e-4)
    for a, b in zip(large.linears, small.linears, strict=True):
        assert a.probe_grad_square == pytest.approx(b.probe_grad_square, rel=0.05)
        assert a.probe_input_square == pytest.approx(b.probe_input_square, rel=0.05)


def test_the_perturbation_has_the_size_that_was_asked_for(network: Network) -> None:
    seen: list[float] = []
    before = [w.detach().clone() for w in network.weights]

    class Watching(Network):
        def run(self, observer: Any) -> Any:
            if isinstance(observer, Comparer):
                pairs = zip(self.weights, before, strict=True)
                seen.append(sum((w - b).norm().item() ** 2 for w, b in pairs) ** 0.5)
            return super().run(observer)

    Watching(**vars(network)).measure(relative_step=0.02)
    size = float(sum(b.square().sum() for b in before)) ** 0.5
    assert seen == [pytest.approx(0.02 * size, rel=1e-3)]
    assert all(torch.equal(w, b) for w, b in zip(network.weights, before, strict=True))
    assert network.prepared == 0


def test_first_order_is_the_slope_of_the_loss(network: Network) -> None:
    """Moving every Y of a linear by h eY changes the mean loss by h `first`."""
    table = network.measure()
    h = 1e-4
    for i, name in enumerate(NAMES):
        change = sum(loss_moved(network, i, m, h) - loss_moved(network, i, m, -h) for m in (0, 1))
        slope = change / (2 * h) / MICROBATCHES
        assert table.linears[i].formats["fp4"].first == pytest.approx(slope, rel=1e-3), name


def loss_moved(network: Network, linear: int, microbatch: int, h: float) -> float:
    """The microbatch's loss in FP64 with h eY (fp4) added to one linear's output."""
    x, target = network.inputs[microbatch].double(), network.targets[microbatch].double()
    with torch.no_grad():
        for i, w in enumerate(network.weights):
            y = x @ w.double().t()
            if i == linear:
                y = y + h * error_of_output(x.float(), w.detach())
            x = torch.tanh(y)
        return (x - target).square().sum(1).mean().item()


def error_of_output(x: torch.Tensor, w: torch.Tensor, name: str = "fp4") -> torch.Tensor:
    x_q = quantize_dequantize(x, FORMATS[name], (1, 128)).double()
    w_q = quantize_dequantize(w, FORMATS[name], (128, 128)).double()
    return x_q @ w_q.t() - x.double() @ w.double().t()


def test_the_table_says_what_was_measured(network: Network) -> None:
    table = network.measure(step=17)
    assert table.step == 17
    losses = [
        network.forward(x, t, network.weights, None).item()
        for x, t in zip(network.inputs, network.targets, strict=True)
    ]
    assert table.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    for linear in table.linears:
        assert (linear.microbatches, linear.tokens) == (MICROBATCHES, TOKENS * MICROBATCHES)
        assert set(linear.formats) == {"fp8", "fp4"}
        assert linear.formats["fp4"].fisher > linear.formats["fp8"].fisher > 0


def test_measuring_is_repeatable_and_draws_no_random_numbers(network: Network) -> None:
    state = torch.get_rng_state()
    assert network.measure(step=3) == network.measure(step=3)
    assert network.measure(step=3) != network.measure(step=4)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_before_the_first_step_the_gradient_is_the_update(kind: str) -> None:
    network = Network.make(steps=0, optimizer=kind)
    network._backward(None)
    gradients = [float(w.grad.square().sum()) for w in network.weights if w.grad is not None]
    for w in network.weights:
        w.grad = None
    tables = [network.measure(step) for step in range(40)]
    for i, square in enumerate(gradients):
        linears = [t.linears[i] for t in tables]
        # The microbatches' gradients are joined by a sketch: a mean over steps' signs.
        assert np.mean([s.update_square for s in linears]) == pytest.approx(square, rel=0.15)
        # D is 1, and rounding's errors are nearly independent.
        errors = np.mean([s.formats["fp4"].wgrad_error_square for s in linears])
        loc = np.mean([s.formats["fp4"].local_square * s.update_square for s in linears])
        assert loc == pytest.approx(errors, rel=0.3)


def test_a_frozen_weight_is_measured_and_not_perturbed() -> None:
    network = Network.make(steps=3)
    network.weights[1].requires_grad_(False)
    table = network.measure()
    frozen = table.linears[1]
    assert frozen.formats["fp4"].fisher > 0
    assert frozen.formats["fp4"].local_square == 0
    assert frozen.update_square == 0
    assert table.linears[0].formats["fp4"].local_square > 0


def test_weights_come_first_and_two_passes_follow(network: Network) -> None:
    network.passes.clear()
    network.measure()
    assert network.prepared == 0  # finished as often as prepared
    assert [type(o) for o in network.passes] == [Recorder, Comparer]


@pytest.mark.parametrize("where", ["recorder", "comparer", "perturb"])
def test_a_failure_leaves_the_weights_as_they_were(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    network = Network.make(steps=3)
    before = [w.detach().clone() for w in network.weights]
    calls: list[int] = []

    def fail_late(original: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("late")
            return original(*args, **kwargs)

        return wrapped

    if where == "recorder":
        monkeypatch.setattr(recorder, "fprop_error", fail_late(recorder.fprop_error))
    elif where == "comparer":
        monkeypatch.setattr(Comparer, "_compare", fail_late(Comparer._compare))
    else:
        monkeypatch.setattr(refresh, "perturb", fail_late(refresh.perturb))
    with pytest.raises(RemoteFailure, match="RuntimeError: late"):
        network.measure()
    assert all(torch.equal(w, b) for w, b in zip(network.weights, before, strict=True))
    assert network.prepared == 0


def test_a_pass_that_raises_leaves_the_weights_as_they_were() -> None:
    network = Network.make(steps=3)
    before = [w.detach().clone() for w in network.weights]

    class Failing(Network):
        def run(self, observer: Any) -> Any:
            if isinstance(observer, Comparer):
                raise MemoryError
            return super().run(observer)

    with pytest.raises(MemoryError):
        Failing(**vars(network)).measure()
    assert all(torch.equal(w, b) for w, b in zip(network.weights, before, strict=True))
    assert network.prepared == 0


def test_nan_in_the_weights_gives_the_measurement_up() -> None:
    network = Network.make(steps=3)
    with torch.no_grad():
        network.weights[2][0, 0] = float("nan")
    with pytest.raises(ValueError, match="finite, nonzero"):
        network.measure()


def test_the_pieces_used_here_are_the_real_ones() -> None:
    """The helper above quantizes by hand; it must be what fprop sees."""
    network = Network.make(steps=0)
    x, w = network.inputs[0], network.weights[0].detach()
    operands = Operands(x, w, torch.zeros(TOKENS, w.shape[0]))
    found = fprop_error(operands, exact_output(operands), "fp4")
    wanted = error_of_output(x, w)
    torch.testing.assert_close(found.output.double(), wanted, rtol=1e-4, atol=1e-6)
