"""A format that breaks training: what simulated GEMMs see of its operands is changed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_snip.linears import quantized_linear as gemms
from megatron_snip.types import Gemm, Operand

Change = Callable[[torch.Tensor, Operand, Gemm], torch.Tensor]
"""(quantized operand, which, of which GEMM) -> what the GEMM sees."""


@contextmanager
def broken_format(broken: str, change: Change) -> Iterator[None]:
    """Within, operands in the format called `broken` are changed."""
    single = gemms.quantize_dequantize_operand
    pair = gemms.quantize_dequantize_pair

    def operand(x: torch.Tensor, name: Any, role: Operand, gemm: Gemm, **options: Any) -> Any:
        seen = single(x, name, role, gemm, **options)
        return change(seen, role, gemm) if name == broken else seen

    def both(x: torch.Tensor, names: Any, role: Operand, **options: Any) -> Any:
        first = Gemm.FPROP if role is Operand.INPUT else Gemm.DGRAD
        parts = zip(pair(x, names, role, **options), names, (first, Gemm.WGRAD), strict=True)
        return tuple(change(t, role, gemm) if name == broken else t for t, name, gemm in parts)

    with (
        mock.patch.object(gemms, "quantize_dequantize_operand", operand),
        mock.patch.object(gemms, "quantize_dequantize_pair", both),
    ):
        yield
