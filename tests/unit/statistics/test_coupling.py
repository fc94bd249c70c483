"""How errors couple to what the probe changes: sums against Jacobians, and failures."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from megatron_snip.formats import FORMATS
from megatron_snip.statistics import coupling
from megatron_snip.statistics.coupling import couple
from megatron_snip.statistics.measure import Operands
from megatron_snip.statistics.observation import Observation, ProbedRows, SampledRows
from megatron_snip.statistics.pooling import pooled_squares
from megatron_snip.statistics.recorder import MeasureSettings, Recorder
from megatron_snip.statistics.sensitivity import gather_sensitivity
from megatron_snip.statistics.sketch import SketchSigns
from megatron_snip.topology import Placement, Topology
from tests.unit.statistics.equations import (
    Linear,
    Microbatch,
    Scales,
    dequantized,
    dequantized_grad,
)
from tests.unit.statistics.network import MICROBATCHES, NAMES, TOKENS, Network
from tests.unit.statistics.test_refresh import error_of_output

DRAWS = 60


@pytest.fixture(scope="module")
def network() -> Network:
    return Network.make(steps=5)


def test_the_mean_over_signs_is_the_jacobian(network: Network) -> None:
    """E over r of fwd^2 and scale^2 (weights' rounding and activations'), by autograd."""
    tables = [network.measure(step) for step in range(DRAWS)]
    inputs = network.refresh_inputs()
    found = gather_sensitivity(inputs.trained, network.optimizer, Topology())
    scales = [s.d.double() / (s.update_square or 1.0) ** 0.5 for s in found.values()]
    # Sums over the tokens of all microbatches, by (linear, weight): squared only at the end.
    per_n, per_k, outputs = ({(i, j): 0.0 for i in range(3) for j in range(3)} for _ in range(3))
    for m in range(MICROBATCHES):
        x = network.inputs[m]
        for i, (grads, _) in enumerate(network.jacobians(m)):
            w = network.weights[i].detach()
            by_w = x.double() @ error_of_output(torch.eye(w.shape[1]), w)  # X dW^T
            y = x.double() @ w.double().t()
            for j, (jacobian, scale) in enumerate(zip(grads, scales, strict=True)):
                scaled = (jacobian * scale).flatten(2)  # [M, N, weights]
                per_n[i, j] += torch.einsum("tnp,tn->np", scaled, by_w)
                per_k[i, j] += torch.einsum("tnp,nk,tk->kp", scaled, w.double(), rounded(x))
                outputs[i, j] += torch.einsum("tnp,tn->np", scaled, y)
            x = torch.tanh(x @ w.t())
    channels, wholes, whole_channels, together = (np.zeros(3) for _ in range(4))
    for i, j in per_n:
        together[i] += float((per_n[i, j].sum(0) + per_k[i, j].sum(0)).square().sum())
        channels[i] += float(per_n[i, j].square().sum() + per_k[i, j].square().sum())
        whole_channels[i] += float(outputs[i, j].square().sum())
        wholes[i] += float(outputs[i, j].sum(0).square().sum())
    for i, name in enumerate(NAMES):
        linears = [t.linears[i] for t in tables]
        channel = np.mean([s.formats["fp4"].forward_channel_square for s in linears])
        # One draw of the whole scatters by sqrt(2) of itself, of the channels by much less.
        assert channel == pytest.approx(channels[i], rel=0.15), name
        whole = np.mean([s.formats["fp4"].forward_whole_square for s in linears])
        assert whole == pytest.approx(together[i], rel=0.5), name
        apart = np.mean([s.scale_channel_square for s in linears])
        assert apart == pytest.approx(whole_channels[i], rel=0.15), name
        assert np.mean([s.scale_square for s in linears]) == pytest.approx(wholes[i], rel=0.5), name


def test_the_part_along_the_output_is_added(network: Network) -> None:
    for s in network.measure().linears:
        for f in s.formats.values():
            assert f.forward_scale_square > 0
            apart = f.forward_channel_square + f.forward_scale_square
            assert f.forward_square == pytest.approx((f.forward_whole_square + 8 * apart) / 9)
    outputs = [network.inputs[m] @ network.weights[0].detach().t() for m in range(MICROBATCHES)]
    errors = [error_of_output(x, network.weights[0].detach()) for x in network.inputs]
    along = sum(float((e * y).sum()) for e, y in zip(errors, outputs, strict=True))
    total = sum(float(y.double().square().sum()) for y in outputs)
    linears = network.measure().linears
    pooled = pooled_squares(
        [s.name for s in linears],
        [s.scale_square for s in linears],
        [s.scale_channel_square for s in linears],
    )
    wanted = (along / total) ** 2 * pooled[0]
    assert linears[0].formats["fp4"].forward_scale_square == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.quantized])
def test_a_samples_errors_are_those_of_the_whole_tensor(name: str) -> None:
    """fprop's X exactly as in the whole tensor; dgrad's G with the same scales, rounded anew."""
    placement = Placement("l", 0, "row", 128, 256)
    generator = torch.Generator().manual_seed(4)
    x, w, g = (torch.randn(s, generator=generator) for s in ((40, 128), (256, 128), (40, 256)))
    settings = MeasureSettings((name,), step=4, seed=9, num_rows=6)
    recorder = Recorder(settings, Topology(), {})
    recorder.record(placement, Operands(x, w, g))
    (seen,) = recorder.observations["l"]
    input_error, grad_error = coupling._row_errors(placement, seen, settings, 0)
    fmt = FORMATS[name]
    whole = dequantized(x.numpy(), name, (1, fmt.tile))
    np.testing.assert_allclose(input_error.numpy(), (whole - x.numpy())[seen.rows], atol=1e-7)
    linear, scales = Linear("l", w.numpy(), w.numpy(), 1.0), Scales(1, 1.0, 1.0, seed=9, step=4)
    batch = Microbatch(0, x.numpy(), g.numpy(), x.numpy(), g.numpy(), seen.rows.numpy())
    whole = dequantized_grad(linear, batch, name, "dgrad", (1, fmt.tile), scales)
    np.testing.assert_allclose(grad_error.numpy(), whole - g.numpy()[seen.rows], atol=1e-7)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Q(X) - X: what an identity, which rounds to itself, lets through."""
    return error_of_output(x, torch.eye(x.shape[1]))


def test_several_probes_are_averaged(network: Network) -> None:
    """N probes are the mean of N single ones with the same signs."""
    both = network.measure(step=3, probes=2)
    first = network.measure(step=3)
    for a, b in zip(both.linears, first.linears, strict=True):
        assert a.formats["fp4"].local_square == b.formats["fp4"].local_square
        second = 2 * a.probe_grad_square - b.probe_grad_square
        assert second > 0
        assert second != pytest.approx(b.probe_grad_square, rel=1e-3)
        for f in a.formats.values():
            apart = f.forward_channel_square + f.forward_scale_square
            assert f.forward_square == pytest.approx((2 * f.forward_whole_square + 8 * apart) / 10)


def test_the_whole_of_several_microbatches_is_the_square_of_their_sum(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one probe at all tokens it is known exactly, and not pooled over linears of a kind."""
    totals = dict.fromkeys(NAMES, 0.0)
    add = coupling._add

    def watched(placement: Placement, seen: Observation, sample: Any, sums: Any, *rest: Any) -> Any:
        totals[placement.name] += float(sums.wholes[:, 2].sum())  # of fp4
        return add(placement, seen, sample, sums, *rest)

    monkeypatch.setattr(coupling, "_add", watched)
    table = network.measure()
    for s in table.linears:
        wanted = (totals[s.name] / table.probe_step) ** 2
        assert s.formats["fp4"].forward_whole_square == pytest.approx(wanted, rel=1e-6)


SETTINGS = MeasureSettings(("fp4",), step=0, seed=0, num_rows=4)
SIGNS = SketchSigns(0, 0)


def seen(rows: int = 4) -> Observation:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    return Observation(
        microbatch=0,
        rows=torch.arange(rows),
        first=zeros(1, TOKENS),
        norms=zeros(5),
        errors=zeros(1, 6),
        output_error=zeros(1, TOKENS),
        grad=zeros(TOKENS),
        couplings=zeros(1, 3, 2),
        scalings=zeros(2, 2),
        sketches=zeros(6, 64),
        wgrad=zeros(64),
        probe=zeros(4),
        sampled=SampledRows(torch.randn(rows, 8), torch.randn(rows, 6)),
        probed=ProbedRows(torch.randn(rows, 8), torch.randn(rows, 6)),
    )


def test_what_was_not_compared_has_no_coupling() -> None:
    placement, weight = Placement("l", 0, "row", 8, 6), torch.randn(6, 8)
    rerouted, other = seen(), seen()
    rerouted.probed = None
    assert couple(placement, weight, [rerouted], SETTINGS, SIGNS) is None
    assert couple(placement, weight, [rerouted, other], SETTINGS, SIGNS) is None
    assert rerouted.couplings.abs().max() == 0
    assert other.couplings.abs().max() > 0


@pytest.mark.parametrize("where", ["_local_sums", "_add"])
def test_a_failure_is_returned_and_the_rows_are_given_back(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    placement, weight = Placement("l", 0, "row", 8, 6), torch.randn(6, 8)
    good, bad = seen(), seen()
    assert couple(placement, weight, [good], SETTINGS, SIGNS) is None
    assert (good.couplings[..., 0] > 0).all()
    assert (good.scalings[..., 0] > 0).all()
    assert good.probed is None
    monkeypatch.setattr(coupling, where, fail)
    assert couple(placement, weight, [bad], SETTINGS, SIGNS) == "l: RuntimeError: out of memory"
    assert bad.probed is None


def test_what_failed_sums_held_is_free_before_zeros_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    make_zeros = coupling._Sums.zeros

    def fail(*_: object) -> None:
        large = torch.zeros(8)
        held.append(weakref.ref(large))
        raise RuntimeError("out of memory")

    def zeros(*args: Any) -> Any:
        assert held[0]() is None
        return make_zeros(*args)

    monkeypatch.setattr(coupling, "_local_sums", fail)
    monkeypatch.setattr(coupling._Sums, "zeros", zeros)
    placement, weight = Placement("l", 0, "row", 8, 6), torch.randn(6, 8)
    assert couple(placement, weight, [seen()], SETTINGS, SIGNS) == "l: RuntimeError: out of memory"
    assert len(held) == 1
