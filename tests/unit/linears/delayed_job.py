"""One simulated linear in delayed scaling, outside of a model."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from torch import Tensor

from megatron_snip.formats import get_format
from megatron_snip.linears.megatron_linear import SimulatedMegatronLinear
from megatron_snip.linears.runtime import Runtime
from megatron_snip.options import Option
from megatron_snip.topology import Placement, Topology

PLACEMENT = Placement("decoder.layers.0.mlp.linear_fc2", 0, "row", 64, 48)
DELAYED, HYBRID = map(get_format, ("fp8_delayed", "fp8_delayed_hybrid"))


class Linear(torch.nn.Module):
    """What the override sees of Megatron's linears."""

    def __init__(self, length: int, algorithm: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(48, 64, generator=generator))
        self.config = SimpleNamespace(
            fp8_amax_history_len=length,
            fp8_amax_compute_algo=algorithm,
            fp8_margin=0,
            tp_only_amax_red=False,
        )

    def _forward_impl(self, **_: Any) -> Tensor:
        raise AssertionError("every GEMM is simulated")

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(input=x, weight=self.weight, bias=None)


class Job:
    """One linear in delayed scaling, called with X and G of sizes that the test chooses."""

    def __init__(self, length: int = 1, algorithm: str = "most_recent") -> None:
        self.module = Linear(length, algorithm)
        self.runtime = Runtime(Topology(), seed=0)
        self.linear = SimulatedMegatronLinear(self.module, [PLACEMENT], self.runtime)
        self.linear.option = Option.uniform("fp8_delayed")
        self.linear.install()

    def forward(self, size: float, recomputes: bool = False) -> tuple[Tensor, Tensor]:
        """X and Y of a microbatch."""
        x = (torch.arange(32.0 * 64).view(32, 64).cos() * size).requires_grad_()
        return x, checkpoint(self.module, False, x) if recomputes else self.module(x)

    def step(self, iteration: int, *sizes: float) -> list[Tensor]:
        """Y and dX of each microbatch, whose G has the size of its X."""
        found = []
        with self.runtime.training_pass(iteration):
            for size in sizes:
                x, y = self.forward(size)
                y.backward(torch.full_like(y, size))
                assert x.grad is not None
                found += [y.detach(), x.grad]
        return found

    def state(self) -> dict[str, str]:
        return self.runtime.delayed.state_dict()

    def scales(self) -> Tensor:
        with torch.no_grad():
            self.forward(1.0)
        read = self.linear.delayed_scales(PLACEMENT)
        assert read is not None
        return read(DELAYED)
