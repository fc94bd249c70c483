"""A tap changes nothing and reports each backward once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_snip.statistics.tap import all_tokens, tap
from megatron_snip.topology import TensorAxis


def run(tapped: bool, reentrant: bool | None = None) -> tuple[list[torch.Tensor], list[Any]]:
    torch.manual_seed(0)
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    seen: list[Any] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x @ w.t()
        if tapped:
            y = tap(y, x, w, lambda *args: seen.append([a.detach().clone() for a in args]))
        return torch.tanh(y)

    y = forward(x) if reentrant is None else checkpoint(forward, x, use_reentrant=reentrant)
    y.square().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad], seen


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_nothing_changes_and_every_backward_is_seen_once(reentrant: bool | None) -> None:
    """With and without recomputing the forward in the backward."""
    plain, _ = run(tapped=False)
    results, seen = run(tapped=True, reentrant=reentrant)
    assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))
    assert len(seen) == 1
    x, w, g = seen[0]
    y, dx, dw = results
    torch.testing.assert_close(g, 2 * y * (1 - y**2))  # d sum(tanh^2) / d pre-activation
    torch.testing.assert_close(g @ w, dx)
    torch.testing.assert_close(g.t() @ x, dw)


def test_without_a_backward_there_is_no_tap() -> None:
    x, w = torch.randn(5, 4), torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        y = x @ w.t()
        assert tap(y, x, w, lambda *_: None) is y
    frozen = x @ w.detach().t()
    assert tap(frozen, x, w, lambda *_: None) is frozen


def test_a_frozen_weight_below_trained_ones_is_seen() -> None:
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4)
    seen: list[Any] = []
    tap(x @ w.t(), x, w, lambda *args: seen.append(args)).sum().backward()
    assert len(seen) == 1


def test_tokens_are_flattened_and_gathered_only_when_split() -> None:
    x = torch.randn(6, 2, 4)
    assert torch.equal(all_tokens(x, TensorAxis(), sequence_parallel=True), x.reshape(12, 4))
    split = TensorAxis(rank=0, size=2)  # without a group there is nobody to gather from
    assert torch.equal(all_tokens(x, split, sequence_parallel=False), x.reshape(12, 4))


def test_hooks_of_a_weight_without_a_gradient_are_not_called() -> None:
    """Those of Megatron, with overlapped reduction, raise where a parameter's gradient is None."""
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    called: list[str] = []
    accumulate = w.expand_as(w).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    accumulate.register_hook(lambda *_: called.append("hook"))
    tap(x @ w.detach().t(), x, w, lambda *_: None).sum().backward()
    assert called == []
    tap(x @ w.t(), x, w, lambda *_: None).sum().backward()
    assert called == ["hook"]
