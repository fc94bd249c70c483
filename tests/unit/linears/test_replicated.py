"""A linear that every tensor-parallel rank holds in full, simulated: what its ranks draw."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.te.simulated import SimulatedTELinear
from megatron_snip.options import Option
from megatron_snip.topology import Axis, Placement, Topology

NAME = "decoder.layers.0.self_attention.linear_kv_down_proj"


class Linear(torch.nn.Module):
    """What the override sees of Transformer Engine's `TELinear`."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(48, 64, generator=generator))
        self.config = SimpleNamespace(sequence_parallel=sequence_parallel)
        self.parallel_mode = None
        self.tp_size = 1
        self.tp_group = None
        self.fuse_wgrad_accumulation = False
        self.use_bias = False

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.weight.t(), None


def input_grad(
    x: torch.Tensor, grad: torch.Tensor, tensor: Axis, sequence_parallel: bool
) -> torch.Tensor:
    """dX on a rank of the tensor axis; its GEMM rounds grad_output stochastically."""
    module, runtime = Linear(sequence_parallel), Runtime(Topology(tp=tensor), seed=1)
    place = Placement(NAME, 0, "column", 64, 48, Axis(rank=tensor.rank))
    linear = SimulatedTELinear(module, [place], runtime)
    linear.option = Option.uniform("fp4")
    linear.install()
    x = x.clone().requires_grad_()
    with runtime.training_pass(5):
        y, _ = module(x)
        y.backward(grad)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_draw_the_numbers_of_their_own_tokens(
    sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one rank with all tokens; a token's dX depends on its own row of grad_output alone."""
    monkeypatch.setattr("megatron_snip.linears.te.modules.is_replicated", lambda _: True)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 2, 64, generator=generator)  # [s, b, K]
    grad = torch.randn(8, 2, 48, generator=generator)
    full = input_grad(x, grad, Axis(), sequence_parallel)
    for rank in range(2):
        part = slice(4 * rank, 4 * rank + 4) if sequence_parallel else slice(None)
        found = input_grad(x[part], grad[part], Axis(rank, 2), sequence_parallel)
        torch.testing.assert_close(found, full[part])
