"""The three GEMMs of a linear on rows and columns of quantized operands.

Y  = X.rows W.rows^T      dX = G.rows W.columns      dW = G.columns^T X.columns
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformer_engine.pytorch.quantizers import HybridQuantizer, Quantized, Quantizer, rounded


@dataclass
class Call:
    weight: Quantized
    input_quantizer: Quantizer
    grad_quantizer: Quantizer
    tp_group: Any
    parallel_mode: str | None
    sequence_parallel: bool


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
        column, row = call.parallel_mode == "column", call.parallel_mode == "row"
        full = gathered(x, call.tp_group) if column and call.sequence_parallel else x
        if full is not x and isinstance(call.input_quantizer, HybridQuantizer):
            full = rounded(full, call.input_quantizer.row_recipe)  # shards travel as their rows
        quantized = call.input_quantizer.quantize(full)
        ctx.save_for_backward(quantized.columns, call.weight.columns, weight)
        ctx.call = call
        out = (quantized.rows @ call.weight.rows.t()).to(x.dtype)
        if row and call.tp_group is not None:
            out = reduced(out, call.tp_group, call.sequence_parallel)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call: Call = ctx.call
        x, w, weight = ctx.saved_tensors
        g = grads[0]
        column, row = call.parallel_mode == "column", call.parallel_mode == "row"
        if row and call.sequence_parallel:
            g = gathered(g, call.tp_group)
        quantized = call.grad_quantizer.quantize(g)
        dx = (quantized.rows @ w).to(g.dtype)
        if column and call.tp_group is not None:
            dx = reduced(dx, call.tp_group, call.sequence_parallel)
        dw = quantized.columns.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return dx, dw.to(weight.dtype), None


def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    pieces = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces)


def reduced(x: torch.Tensor, group: Any, of_own_tokens: bool) -> torch.Tensor:
    """Sum over the ranks, of all tokens or of this rank's alone."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].contiguous() if of_own_tokens else total
