"""What `calibrate` times is what training runs."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.cli.gemm_bench import Shape, _Bench
from megatron_snip.linears.autograd import LinearCall, QuantizedLinear
from megatron_snip.options import Option
from megatron_snip.types import Gemm


@pytest.mark.parametrize("name", ["fp8", "fp4", "mxfp8", "bf16"])
def test_gemms_are_those_of_a_linear(name: str) -> None:
    bench, option = (
        _Bench(Shape("*", 144, 272), 200, torch.device("cpu"), 0.0),
        Option.uniform(name),
    )
    x, w = (t.clone().requires_grad_() for t in (bench.x, bench.w))
    call = LinearCall(option, lambda: bench.stream, False, False, False, None)
    y = QuantizedLinear.apply(x, w, None, call)  # type: ignore[no-untyped-call]
    y.backward(bench.g)
    timed = {gemm: bench.gemm(gemm, option)() for gemm in Gemm}
    assert torch.equal(timed[Gemm.FPROP], y) and torch.equal(timed[Gemm.DGRAD], x.grad)
    assert torch.equal(timed[Gemm.WGRAD].to(w.dtype), w.grad)
