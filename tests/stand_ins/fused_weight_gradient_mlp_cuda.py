"""Apex's GEMM that adds a weight gradient to `main_grad`, which Megatron's own linears call."""

import torch


def wgrad_gemm_accum_fp32(
    input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """main_grad [N, K] += grad_output [T, N]^T input [T, K], in FP32."""
    main_grad += grad_output.float().t() @ input.float()


def wgrad_gemm_accum_fp16(
    input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """The same with a main_grad in 16 bits, which is rounded once."""
    main_grad.copy_(main_grad.float() + grad_output.float().t() @ input.float())
