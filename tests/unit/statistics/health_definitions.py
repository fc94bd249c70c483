"""Health as docs/glossary.md defines it, in NumPy."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron_snip.formats import ScaleType
from megatron_snip.quantizers.quantize import operand_block
from megatron_snip.statistics.operands import MEASURED_IN
from megatron_snip.types import Operand
from tests.unit.statistics import equations
from tests.unit.statistics.equations import Toy


def check_health(found: dict[str, Any], toy: Toy, unit: float = 1.0) -> None:
    """Compare a linear's entry of the file with NumPy on the toy's tensors."""
    tensors = {
        Operand.INPUT: toy.inputs,
        Operand.WEIGHT: [toy.weight],
        Operand.GRAD_OUTPUT: toy.grads,
    }
    for operand, parts in tensors.items():
        factor = unit if operand is Operand.GRAD_OUTPUT else 1.0
        amax = max(part.abs().max().item() for part in parts)
        assert found["amax"][operand] == pytest.approx(amax * factor, rel=1e-6)
        part = np.concatenate([p.double().numpy()[:, ::8].ravel() for p in parts])
        first, shares = found["histograms"][operand]
        exponents = np.floor(np.log2(np.abs(part[part != 0]))) + math.log2(factor)
        counts = [(exponents == first + k).mean() for k in range(len(shares))]
        assert shares == pytest.approx(counts, rel=1e-6) and sum(shares) == pytest.approx(1.0)
        for name, fmt in equations.FORMATS.items():
            x = np.concatenate([part.double().numpy() for part in parts])
            q = np.concatenate(
                [
                    toy.quantized(p, name, operand, MEASURED_IN[operand], m)
                    for m, p in enumerate(parts)
                ]
            )
            values = found["operands"][name][operand]
            sqnr = 10 * math.log10((x**2).sum() / ((q - x) ** 2).sum())
            assert values["sqnr_db"] == pytest.approx(sqnr, abs=1e-4)
            zeroed = (q == 0) & (x != 0)
            assert values["underflow"] == pytest.approx(zeroed.mean(), rel=1e-6)
            block = operand_block(fmt, operand, MEASURED_IN[operand])
            tiles = [each for p in parts for each in scales_of(p.double().numpy(), fmt, block)]
            logs = [math.floor(math.log2(scale)) for scale, _ in tiles]
            assert fmt.element is not None
            largest = (1 + 2.0**-20) * fmt.element.max_value
            beyond = sum((abs(tile) > scale * largest).sum() for scale, tile in tiles)
            assert values["saturated"] == pytest.approx(beyond / x.size, rel=1e-6)
            middle = sorted(logs)[(len(logs) - 1) // 2]
            shift = math.log2(factor)
            assert list(values["scale_log2"]) == [v + shift for v in (min(logs), middle, max(logs))]


def scales_of(x: Any, fmt: Any, block: tuple[int, int]) -> list[tuple[float, Any]]:
    """(scale, elements) of each tile that is not zero."""
    found, largest, (r, c) = [], fmt.element.max_value, block
    tensor = np.abs(x).max() / (448 * largest)
    for top in range(0, x.shape[0], r):
        for left in range(0, x.shape[1], c):
            tile = x[top : top + r, left : left + c]
            scale = np.abs(tile).max() / largest
            if scale == 0:
                continue
            if fmt.scale is ScaleType.E8M0:
                scale = 2.0 ** math.ceil(math.log2(scale))
            elif fmt.scale is ScaleType.E4M3:
                stored = torch.tensor(scale / tensor).clamp(2.0**-6, 448.0)
                scale = stored.to(torch.float8_e4m3fn).item() * tensor
            found.append((scale, tile))
    return found
