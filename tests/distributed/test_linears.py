"""Quantized linears in Megatron's own classes, sharded or not, against dequantized GEMMs.

The truth is computed from unsharded tensors on every rank, with the NumPy quantizer of the unit
tests where rounding is to nearest, and in FP64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_snip.formats import FORMATS
from megatron_snip.linears.discovery import current_topology
from megatron_snip.linears.megatron_linear import SimulatedMegatronLinear
from megatron_snip.linears.runtime import Runtime
from megatron_snip.options import Option
from megatron_snip.patches import cpu
from megatron_snip.quantizers.quantize import quantize_dequantize
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.topology import Placement, Topology
from megatron_snip.types import Gemm
from tests.distributed.launch import run_ranks
from tests.unit.quantizers import oracle

NAME, SEED, STEP = "decoder.layers.0.mlp.linear_fc1", 5, 7
BATCH = 2
OPTIONS = ("fp8", "fp4", "fp4-fp8-bf16", "bf16-fp4-fp4", "fp8-bf16-fp4")


@dataclass(frozen=True)
class Case:
    """One kind of linear in one layout.

    By default a rank's 64 tokens of two are no complete tile of wgrad, so X is quantized after it
    is gathered.
    """

    kind: str  # column, gated (column whose output is [gate; up]) or row
    sequence_parallel: bool = False
    bias: bool = False
    frozen: bool = False  # the weight does not train
    fused: bool = False  # dW is added into main_grad
    dtype: torch.dtype = torch.float32
    sequence: int = 64

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), unsharded."""
        return (256, 512) if self.kind == "row" else (512, 256)

    @property
    def config(self) -> ModelParallelConfig:
        return ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(),
            sequence_parallel=self.sequence_parallel and dist.get_world_size() > 1,
            params_dtype=self.dtype,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )

    def placement(self, topology: Topology) -> Placement:
        n, k = self.shape
        return Placement(
            NAME,
            0,
            "row" if self.kind == "row" else "column",
            in_features=k,
            out_features=n,
            tp=topology.tp,
            num_chunks=2 if self.kind == "gated" else 1,
        )

    def shard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor along its sharded dim."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if self.kind == "gated":
            return torch.cat([h.chunk(size, dim)[rank] for h in tensor.chunk(2, dim)], dim)
        return tensor.chunk(size, dim)[rank]


CASES = {
    "column": Case("column"),
    "column bias": Case("column", bias=True),
    "column sp": Case("column", sequence_parallel=True),
    "gated": Case("gated"),
    "row": Case("row"),
    "row sp": Case("row", sequence_parallel=True),
    "column frozen": Case("column", frozen=True),
    "column sp frozen": Case("column", sequence_parallel=True, frozen=True),
    "row fused": Case("row", fused=True),
    "column sp fused": Case("column", sequence_parallel=True, fused=True),
    "column sp tiles": Case("column", sequence_parallel=True, sequence=128),
    "gated bf16": Case("gated", dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Tensors:
    """Whole tensors of two microbatches, the same on every rank."""

    inputs: list[torch.Tensor]  # [s, b, K]
    grads: list[torch.Tensor]  # [s, b, N]
    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor  # [N]

    @classmethod
    def make(cls, case: Case) -> Tensors:
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator)
            return (values * torch.rand(shape[-1], generator=generator)).to(case.dtype)

        n, k = case.shape
        return cls(
            [draw(case.sequence, BATCH, k) for _ in range(2)],
            [draw(case.sequence, BATCH, n) for _ in range(2)],
            draw(n, k),
            draw(n),
        )


def quantized_linears() -> dict[str, Any]:
    """On ranks: largest error of Y, dX, dW, db of every case and option, relative to the truth."""
    with megatron():
        topology = current_topology()
        return {
            name: {text: _errors(case, Option.parse(text), topology) for text in OPTIONS}
            for name, case in CASES.items()
        }


@contextmanager
def megatron() -> Iterator[None]:
    cpu.install()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _errors(case: Case, option: Option, topology: Topology) -> dict[str, float | bool]:
    tensors = Tensors.make(case)
    module = _module(case, tensors)
    runtime = Runtime(topology, SEED)
    linear = SimulatedMegatronLinear(module, [case.placement(topology)], runtime)
    linear.option = option
    assert linear.refusal(option) is None
    linear.install()
    with runtime.training_pass(STEP):
        runs = [
            _run(case, module, *each) for each in zip(tensors.inputs, tensors.grads, strict=True)
        ]
    truth = [_truth(case, option, tensors, m) for m in range(2)]
    errors: dict[str, float | bool] = {
        "output": max(_error(y, t["output"]) for (y, _), t in zip(runs, truth, strict=True)),
        "input grad": max(_error(d, t["input"]) for (_, d), t in zip(runs, truth, strict=True)),
    }
    return errors | _weight_errors(case, module, truth)


def _module(case: Case, tensors: Tensors) -> Any:
    n, k = case.shape
    kind = RowParallelLinear if case.kind == "row" else ColumnParallelLinear
    extra = {"input_is_parallel": True} if case.kind == "row" else {"gather_output": False}
    module: Any = kind(
        k,
        n,
        config=case.config,
        init_method=lambda w: w,
        bias=case.bias,
        skip_bias_add=False,
        **extra,
    )
    with torch.no_grad():
        module.weight.copy_(case.shard(tensors.weight, 1 if case.kind == "row" else 0))
        if case.bias:
            module.bias.copy_(case.shard(tensors.bias, 0))
    module.weight.requires_grad_(not case.frozen)
    if case.fused:
        # What DDP sets up; the module's own flag would ask for a CUDA extension when it is built.
        module.gradient_accumulation_fusion = True
        module.weight.main_grad = torch.zeros(module.weight.shape)
        module.weight.grad_added_to_main_grad = False
    return module


def _run(
    case: Case, module: Any, x: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward and backward on this rank's parts; return the unsharded Y and dX."""
    sp = case.sequence_parallel and dist.get_world_size() > 1
    row = case.kind == "row"
    x = case.shard(x, 2) if row else (_tokens(x) if sp else x)
    g = (_tokens(g) if sp else g) if row else case.shard(g, 2)
    x = x.clone().requires_grad_()
    y, _ = module(x)
    y.backward(g)
    assert x.grad is not None
    if row:
        return (torch.cat(_gathered(y), 0) if sp else y.detach()), _all_features(case, x.grad, 2)
    return _all_features(case, y, 2), (torch.cat(_gathered(x.grad), 0) if sp else x.grad)


def _weight_errors(
    case: Case, module: Any, truth: list[dict[str, np.ndarray]]
) -> dict[str, float | bool]:
    if case.frozen:
        return {"no weight grad": module.weight.grad is None}
    wanted = truth[0]["weight"] + truth[1]["weight"]
    local = module.weight.main_grad if case.fused else module.weight.grad
    found: dict[str, float | bool] = {
        "weight grad": _error(_all_features(case, local, 1 if case.kind == "row" else 0), wanted)
    }
    if case.fused:
        found["flagged as added"] = module.weight.grad_added_to_main_grad is True
    if case.bias:
        grad = truth[0]["bias"] + truth[1]["bias"]
        found["bias grad"] = _error(_all_features(case, module.bias.grad, 0), grad)
    return found


def _truth(case: Case, option: Option, tensors: Tensors, microbatch: int) -> dict[str, np.ndarray]:
    """Y, dX, dW, db from unsharded tensors: dequantized operands, FP64 products."""
    n, k = case.shape
    x, g = tensors.inputs[microbatch].reshape(-1, k), tensors.grads[microbatch].reshape(-1, n)
    w = tensors.weight

    def grad(gemm: Gemm, block: tuple[int, int]) -> np.ndarray:
        """G as `gemm` sees it; one process's stream, whatever the layout is."""
        stream = StochasticStream(StreamKey(SEED, NAME, STEP, microbatch))
        fmt = FORMATS[option[gemm]]
        if not fmt.stochastic_grad:
            return nearest(g, gemm, block)
        stream = stream.for_gemm(gemm)
        return quantize_dequantize(g.float(), fmt, block, stream=stream).double().numpy()

    def nearest(tensor: torch.Tensor, gemm: Gemm, block: tuple[int, int]) -> np.ndarray:
        fmt = FORMATS[option[gemm]]
        values = tensor.float().numpy()
        if fmt.quantized:
            values = oracle.quantize_dequantize(values, fmt, block)
        return values.astype(np.float64)

    square, along, across = (128, 128), (1, 128), (128, 1)
    y = nearest(x, Gemm.FPROP, along) @ nearest(w, Gemm.FPROP, square).T
    return {
        "output": y + (tensors.bias.double().numpy() if case.bias else 0.0),
        "input": grad(Gemm.DGRAD, along) @ nearest(w, Gemm.DGRAD, square),
        "weight": grad(Gemm.WGRAD, across).T @ nearest(x, Gemm.WGRAD, across),
        "bias": g.double().numpy().sum(0),
    }


def _error(found: torch.Tensor, wanted: np.ndarray) -> float:
    values = found.detach().double().numpy().reshape(wanted.shape)
    return float(np.abs(values - wanted).max() / np.abs(wanted).max())


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), 0)[dist.get_rank()]


def _all_features(case: Case, x: torch.Tensor, dim: int) -> torch.Tensor:
    parts = _gathered(x)
    if case.kind == "gated":
        halves = [p.chunk(2, dim) for p in parts]
        return torch.cat([torch.cat([h[i] for h in halves], dim) for i in range(2)], dim)
    return torch.cat(parts, dim)


def _gathered(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return parts


# FP32 results sum up to 512 products in another order; BF16 ones are rounded once more.
TOLERANCE = {"gated bf16": 2.0**-7}


@pytest.fixture(scope="module")
def errors() -> Callable[[int], list[dict[str, Any]]]:
    """What `quantized_linears` finds on so many ranks."""
    return cache(lambda ranks: run_ranks(ranks, "tests.distributed.test_linears:quantized_linears"))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("case", CASES)
def test_gemms_are_those_of_the_dequantized_operands(
    errors: Callable[[int], list[dict[str, Any]]], ranks: int, case: str
) -> None:
    for result in errors(ranks):
        assert set(result[case]) == set(OPTIONS)
        for option, found in result[case].items():
            assert {"output", "input grad"} < set(found)
            for key, error in found.items():
                good = error if isinstance(error, bool) else error < TOLERANCE.get(case, 2e-6)
                assert good, f"{option}: {key}: {error}"
