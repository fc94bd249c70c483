"""How errors couple to what the probe changes: bias of the estimate, sums against Jacobians."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from megatron_snip.statistics import coupling
from megatron_snip.statistics.coupling import coherent_parts, coherent_square, couple
from megatron_snip.statistics.observation import Observation, ProbedRows, SampledRows
from megatron_snip.statistics.sensitivity import gather_sensitivity
from megatron_snip.topology import Placement, Topology
from tests.unit.statistics.network import MICROBATCHES, NAMES, TOKENS, Network
from tests.unit.statistics.test_refresh import error_of_output

DRAWS = 60


def square(terms: torch.Tensor, noise: torch.Tensor | None, tokens: int) -> float:
    diagonal, off = coherent_parts(terms, noise, tokens).tolist()
    return coherent_square(diagonal, off, len(terms) == tokens)


def test_all_tokens_give_the_square_of_their_sum() -> None:
    terms = torch.tensor([[1.0, 2.0], [3.0, -1.0]])  # sums 4 and 1
    assert square(terms, None, 2) == pytest.approx(17.0)


def test_a_sample_is_unbiased() -> None:
    """The mean over all samples of 3 of 6 tokens is the square over all 6."""
    terms = torch.randn((6, 4), generator=torch.Generator().manual_seed(0))
    whole = terms.double().sum(0).square().sum().item()
    parts = [coherent_parts(terms[list(rows)], None, 6) for rows in combinations(range(6), 3)]
    assert torch.stack(parts).mean(0).sum().item() == pytest.approx(whole, rel=1e-6)


def test_parts_add_up_over_shards() -> None:
    terms = torch.randn((5, 8), generator=torch.Generator().manual_seed(1))
    halves = coherent_parts(terms[:, :4], None, 9) + coherent_parts(terms[:, 4:], None, 9)
    torch.testing.assert_close(coherent_parts(terms, None, 9), halves)


def test_tokens_that_cancel_leave_their_own_squares() -> None:
    """Of a sample, a negative sum over pairs is chance: it must not make a square of nothing."""
    terms = torch.tensor([[1.0], [-1.0]])
    assert square(terms, None, 4) == pytest.approx(2.0 * 4 / 2)
    assert square(terms, None, 2) == pytest.approx(0.0)  # no sample, no chance


def test_noise_comes_off_the_diagonal_only() -> None:
    terms, noise = torch.tensor([[3.0], [3.0]]), torch.tensor([[4.0], [4.0]])
    assert square(terms, noise, 2) == pytest.approx((18 - 8) + 18)
    assert square(terms, 9 * noise, 2) == 0  # never below
    assert square(terms, 9 * noise, 4) == pytest.approx(18 * 6)  # 6 pairs for 1


def test_no_tokens_have_no_effect_and_nan_stays() -> None:
    assert square(torch.zeros((0, 3)), None, 0) == 0.0
    assert square(torch.ones((1, 3)), None, 5) == pytest.approx(15.0)
    assert math.isnan(square(torch.full((2, 3), torch.nan), None, 5))


@pytest.fixture(scope="module")
def network() -> Network:
    return Network.make(steps=5)


def test_the_mean_over_signs_is_the_jacobian(network: Network) -> None:
    """E over r of both estimates of fwd^2 (weights' rounding and activations'), by autograd."""
    tables = [network.measure(step) for step in range(DRAWS)]
    inputs = network.refresh_inputs()
    found = gather_sensitivity(inputs.trained, network.optimizer, Topology())
    scales = [s.d.double() / (s.update_square or 1.0) ** 0.5 for s in found.values()]
    channels, wholes = np.zeros(3), np.zeros(3)
    for m in range(MICROBATCHES):
        x = network.inputs[m]
        for i, (grads, _) in enumerate(network.jacobians(m)):
            w = network.weights[i].detach()
            by_w = x.double() @ error_of_output(torch.eye(w.shape[1]), w)  # X dW^T
            for jacobian, scale in zip(grads, scales, strict=True):
                scaled = (jacobian * scale).flatten(2)  # [M, N, weights]
                per_n = torch.einsum("tnp,tn->np", scaled, by_w)
                per_k = torch.einsum("tnp,nk,tk->kp", scaled, w.double(), rounded(x))
                channels[i] += float(per_n.square().sum() + per_k.square().sum())
                wholes[i] += float((per_n.sum(0) + per_k.sum(0)).square().sum())
            x = torch.tanh(x @ w.t())
    for i in range(len(NAMES)):
        formats = [t.linears[i].formats["fp4"] for t in tables]
        channel = float(np.mean([f.forward_channel_square for f in formats]))
        whole = float(np.mean([f.forward_whole_square for f in formats]))
        # One draw of the whole scatters by sqrt(2) of itself, of the channels by much less.
        assert channel == pytest.approx(channels[i], rel=0.15), NAMES[i]
        assert whole == pytest.approx(wholes[i], rel=0.5), NAMES[i]


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


def seen(rows: int = 4) -> Observation:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    return Observation(
        microbatch=0,
        rows=torch.arange(rows),
        first=zeros(1, TOKENS),
        norms=zeros(5),
        errors=zeros(1, 5),
        output_error=zeros(1, TOKENS),
        grad=zeros(TOKENS),
        couplings=zeros(1, 3, 2),
        probe=zeros(4),
        sampled=SampledRows(
            torch.randn(rows, 8),
            torch.randn(rows, 6),
            torch.randn(1, rows, 8),
            torch.randn(1, rows, 6),
        ),
        probed=ProbedRows(torch.randn(rows, 8), torch.randn(rows, 6), None, None),
    )


def test_what_was_not_compared_has_no_coupling() -> None:
    placement, weight = Placement("l", 0, "row", 8, 6), torch.randn(6, 8)
    rerouted = seen()
    rerouted.probed = None
    assert couple(placement, weight, rerouted, ("fp4",)) is None
    assert rerouted.couplings.abs().max() == 0


def test_a_failure_is_returned_and_the_changes_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    placement, weight = Placement("l", 0, "row", 8, 6), torch.randn(6, 8)
    good, bad = seen(), seen()
    assert couple(placement, weight, good, ("fp4",)) is None
    assert (good.couplings[..., 0] > 0).all()
    assert good.probed is None
    monkeypatch.setattr(coupling, "_products", fail)
    assert couple(placement, weight, bad, ("fp4",)) == "l: RuntimeError: out of memory"
    assert bad.probed is None
