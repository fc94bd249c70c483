"""Simulated delayed scaling against Transformer Engine's own Python, bit for bit.

Each linear is called alone, with X and G of the test's choice: what it multiplies then depends on
its history, and on no other GEMM.
"""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.fp8_utils import get_fp8_recipe
from torch import Tensor
from transformer_engine.pytorch.quantization import fp8_autocast

from megatron_snip.formats import get_format
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te.history import delayed_scales
from tests.models import build, planned

LAYER = "decoder.layers.0"
LINEARS = [
    f"{LAYER}.{name}"
    for name in (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
]
NAMES = {"e4m3": "fp8_delayed", "hybrid": "fp8_delayed_hybrid"}
FLAGS: dict[str, dict[str, Any]] = {
    "Megatron's defaults": {},
    "max of 3": {"fp8_amax_history_len": 3, "fp8_amax_compute_algo": "max", "fp8_margin": 1},
    "newest of 2": {"fp8_amax_history_len": 2},
}
SIZES = (1.0, 8.0, 1e-3, 300.0, 0.25, 0.0, 5.0, 1e-30, 2.0, torch.inf, 1.0, 3.0, 0.5, 40.0)
"""Of X, by microbatch: they grow, shrink, vanish and overflow. G's run backwards."""
FUSED = ("linear_qkv", "linear_fc1")
"""Linears with a norm in them."""


def twins(number_format: str, flags: dict[str, Any]) -> tuple[Any, PlannedModel]:
    """A job in delayed scaling, and a BF16 job of the same weights that simulates it."""
    job = build(fp8=number_format, fp8_recipe="delayed", **flags)
    under = planned(build(**flags), NAMES[number_format], backend="simulate")
    return job, under


def microbatches(name: str, module: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """X and G of each microbatch; norms turn what is infinite into NaN, and get none of it."""
    num_outputs, num_features = module.weight.shape
    generator = torch.Generator().manual_seed(7)
    sizes = [1.0 if size == torch.inf and name.endswith(FUSED) else size for size in SIZES]
    for size, grad_size in zip(sizes, reversed(SIZES), strict=True):
        x = torch.randn(16, 2, num_features, generator=generator)
        g = torch.randn(16, 2, num_outputs, generator=generator)
        x[1, 0, 3:] *= size
        g[2, 1, 2:] *= 1e-3 * grad_size
        yield x.bfloat16(), g.bfloat16()


def results(module: Any, x: Tensor, g: Tensor) -> list[Tensor]:
    """Y, and in the backward dX and dW."""
    x = x.clone().requires_grad_()
    module.weight.grad = None
    y, _ = module(x)
    y.backward(g)
    return [y.detach(), x.grad, module.weight.grad]


def agree(name: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    for what, a, b in zip(("Y", "dX", "dW"), found, wanted, strict=True):
        if what == "dX" and name.endswith(FUSED):  # the norm's backward sums in another order
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-30)
        else:
            assert torch.equal(a, b), (name, what)


def te_history(module: Any) -> Tensor:
    """The history [length, 3] of X, W and G."""
    forward, backward = (module.fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd"))
    return torch.cat([forward.amax_history[:, :2], backward.amax_history[:, :1]], 1)


def histories(under: PlannedModel) -> dict[str, Tensor]:
    """The same in simulation, of every linear that has one."""
    values = {
        name: np.frombuffer(base64.b64decode(text), "<f4").reshape(-1, 3)[1:]
        for name, text in under.delayed_scaling(of_all_ranks=True).items()
    }
    return {name: torch.from_numpy(each.copy()) for name, each in values.items()}


@pytest.mark.parametrize("number_format", NAMES)
@pytest.mark.parametrize("flags", FLAGS)
def test_histories_scales_and_products(number_format: str, flags: str) -> None:
    """Of two microbatches an iteration."""
    job, under = twins(number_format, FLAGS[flags])
    recipe = get_fp8_recipe(job.config)
    fmt = get_format(NAMES[number_format])
    te_modules = {name: job.get_submodule(name) for name in LINEARS}
    linears = {linear.name: linear for linear in under.linears}
    streams = {name: microbatches(name, module) for name, module in te_modules.items()}
    for iteration in range(1, len(SIZES) // 2 + 1):
        with under.runtime.training_pass(iteration):
            for microbatch in range(2):
                for name, module in te_modules.items():
                    module.is_first_microbatch = microbatch == 0
                    x, g = next(streams[name])
                    with fp8_autocast(enabled=True, fp8_recipe=recipe):
                        wanted = results(module, x, g)
                    found = results(linears[name].module, x, g)
                    # In simulation an infinite element is NaN; Transformer Engine saturates it.
                    if x.isfinite().all() and g.isfinite().all():
                        agree(name, found, wanted)
        found_histories = histories(under)
        for name, module in te_modules.items():
            assert torch.equal(found_histories[name], te_history(module)), (name, iteration)
            with torch.no_grad():  # an evaluation reads the scales, and leaves no trace
                linears[name].module(x[..., :1].expand(-1, -1, module.weight.shape[1]))
            scales = linears[name].delayed_scales(linears[name].placements[0])(fmt)
            assert torch.equal(scales, delayed_scales(module)), (name, iteration)
            factor = 4.0 if iteration % 3 else 0.01  # of the weights, which a step quantizes once
            for each in (module, linears[name].module):
                each.weight.data.mul_(factor)
    assert found_histories.keys() == te_modules.keys()
