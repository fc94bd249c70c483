"""What `calibrate` times is what training runs: native GEMMs where the machine has them."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.cli import gemm_bench
from megatron_snip.cli.gemm_bench import Shape, _Bench, machine_of
from megatron_snip.linears import gemms, native
from megatron_snip.linears.backends import Machine
from megatron_snip.options import Option
from megatron_snip.types import Gemm

CPU = torch.device("cpu")


def test_a_cpu_has_no_native_gemms() -> None:
    assert machine_of(CPU) == Machine()


@pytest.mark.parametrize("name", ["fp8", "fp4", "mxfp8", "bf16"])
def test_gemms_run_as_auto_resolves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(a: object, b: object, dtype: torch.dtype) -> torch.Tensor:
        calls.append(name)
        return multiply(a, b, dtype)  # type: ignore[arg-type]

    multiply = native.multiply
    monkeypatch.setattr(native, "multiply", counted)
    option = Option.uniform(name)
    bench = _Bench(Shape("*", 144, 272), 200, CPU, 0.0)
    plain = {gemm: bench.gemm(gemm, option)() for gemm in Gemm}
    assert not calls
    monkeypatch.setattr(gemm_bench, "machine_of", lambda _: Machine((9, 0)))
    hopper = _Bench(Shape("*", 144, 272), 200, CPU, 0.0)
    for gemm in Gemm:
        found = hopper.gemm(gemm, option)()
        assert found.dtype == plain[gemm].dtype
        torch.testing.assert_close(found, plain[gemm], rtol=2e-2, atol=2e-2)
    assert len(calls) == (3 if name in ("fp8", "fp4") else 0)
    assert gemms.fprop(hopper.x, hopper.w, option).shape == (200, 144)
