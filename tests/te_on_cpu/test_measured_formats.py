"""What the statistics quantize is what Transformer Engine's linears multiply, bit for bit."""

import inspect
import re
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common import recipe as built_in

from megatron_snip.linears.te.history import delayed_scales
from megatron_snip.linears.te.machine import OVERRIDE
from megatron_snip.linears.te.quantizers import built_in_recipe
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.quantizers.quantize import quantize_dequantize_operand, rotated
from megatron_snip.types import Gemm, Operand
from tests.te_on_cpu import capability, probe

probe.install()

EVERY = [name for name in RECIPES if name != "bf16"]
TOKENS, ROWS, COLUMNS = 128, 256, 384
OPERANDS = {
    "fprop": (Operand.WEIGHT, Operand.INPUT),
    "dgrad": (Operand.WEIGHT, Operand.GRAD_OUTPUT),
    "wgrad": (Operand.INPUT, Operand.GRAD_OUTPUT),
}
"""GEMM -> what the probe calls its first and second operand."""


def te_recipe(name: str) -> Any:
    recipe = built_in_recipe(name)
    if RECIPES[name].precision.kind == "fp4":
        return type(recipe)(disable_stochastic_rounding=True)
    return recipe


def drawn(rows: int, columns: int, seed: int, size: float) -> Tensor:
    """BF16 with outlier rows and columns, a row of zeros, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * size
    x[3] *= 200.0
    x[:, 9] *= 1e-4
    x[17] = 0.0
    x[5, ::7] = -0.0
    return x.bfloat16()


def gpu_of(name: str) -> tuple[int, int]:
    gpus = RECIPES[name].gpus  # none: a recipe of a run, on any GPU
    return (9, 0) if not gpus or "9.0" in gpus else (10, 0)


@pytest.mark.parametrize("name", EVERY)
def test_operands_of_every_gemm(gpu: ExitStack, name: str) -> None:
    """Three steps, so that delayed scaling has a history: amaxes grow, and its scales lag."""
    gpu.enter_context(capability.on(gpu_of(name)))
    recipe = te_recipe(name)
    module = te.Linear(COLUMNS, ROWS, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(drawn(ROWS, COLUMNS, 1, 0.02))
    fmt = replace(RECIPES[name].quantization, stochastic_grad=False)
    for step in range(3):
        x = drawn(TOKENS, COLUMNS, 2 + step, 2.0**step).requires_grad_()
        g = drawn(TOKENS, ROWS, 5 + step, 1e-4 * 3.0**step)
        scales = delayed_scales(module)
        scales = None if scales is None else scales.clone()
        with probe.gemms() as found, te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = module(x)
            if scales is None and RECIPES[name].has_history:
                scales = torch.ones(3)  # as in the first step of a job
        with probe.gemms() as more:
            y.backward(g)
        tensors = {Operand.INPUT: x.detach(), Operand.WEIGHT: module.weight, Operand.GRAD_OUTPUT: g}
        assert [gemm.name for gemm in (*found, *more)] == ["fprop", "dgrad", "wgrad"]
        for gemm in (*found, *more):
            for operand, multiplied in zip(
                OPERANDS[gemm.name], (gemm.first, gemm.second), strict=True
            ):
                number = None if scales is None else scales[list(Operand).index(operand)]
                ours = quantize_dequantize_operand(
                    tensors[operand].detach(),
                    fmt,
                    operand,
                    Gemm(gemm.name),
                    amax_or_scale=number,
                    dtype=torch.float32,
                )
                assert torch.equal(ours, multiplied), (name, step, gemm.name, operand)


def test_every_variable_that_changes_a_recipe_is_in_the_table() -> None:
    """Those that are in it are measured, refused, or named in a warning."""
    read = set(re.findall(r'getenv\("(NVTE_\w+)"', inspect.getsource(built_in)))
    refinements = {name for name in read if name.startswith("NVTE_NVFP4_4OVER6_")}
    settings = {each.variable for recipe in RECIPES.values() for each in recipe.variables}
    assert len(refinements) == 2  # of NVTE_NVFP4_4OVER6, without which they do nothing
    assert read - refinements == settings | {OVERRIDE}


def test_the_rotation_is_transformer_engine_s() -> None:
    from transformer_engine.pytorch.tensor.nvfp4_tensor import get_rht_matrix

    x = drawn(64, 32, 3, 1.0)
    groups = x.t().float().reshape(-1, 16) @ get_rht_matrix(True, "cpu").float()
    wanted = groups.reshape(32, 64).t().bfloat16().float()
    found = rotated(x, RECIPES["nvfp4"].quantization, Gemm.WGRAD)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("first", ["mxfp8", "tensorwise", "blockwise"])
@pytest.mark.parametrize("kind", ["normal", "outlier columns", "outlier rows", "heavy tails"])
def test_an_fp8_input_that_wgrad_rounds_to_fp4_loses_little_more(first: str, kind: str) -> None:
    """What a gathered input loses, which is rounded twice and measured as rounded once."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 512, generator=generator)
    if kind == "heavy tails":  # Student's t with three degrees of freedom
        squares = torch.randn(3, 512, 512, generator=generator).square()
        x = x / squares.mean(0).sqrt()
    elif kind != "normal":
        x[:, ::97] *= 30.0 if kind == "outlier columns" else 1.0
        x[::53] *= 30.0 if kind == "outlier rows" else 1.0
    x = x.bfloat16()
    fp8, fp4 = (RECIPES[name].quantization for name in (first, "nvfp4"))
    amax = x.float().abs().amax()
    once = quantize_dequantize_operand(
        x, fp8, Operand.INPUT, Gemm.FPROP, amax_or_scale=amax, dtype=torch.bfloat16
    )
    exact = rotated(x.float(), fp4, Gemm.WGRAD)
    errors = []
    for rows in (x, once):
        found = quantize_dequantize_operand(
            rows, fp4, Operand.INPUT, Gemm.WGRAD, dtype=torch.float32
        )
        errors.append((found - exact).square().sum().item())
    assert 1.03 < errors[1] / errors[0] < 1.1
