"""The parts that travel over tensor-parallel ranks come back where they were."""

import torch

from megatron_snip.statistics.observation import Observation, SampledRows


def made() -> Observation:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64)

    return Observation(
        microbatch=3,
        rows=torch.tensor([1, 4]),
        first=numbers(2, 9),
        norms=numbers(5),
        errors=numbers(2, 6),
        output_error=numbers(2, 9),
        grad=numbers(9),
        couplings=numbers(2, 3, 2),
        scalings=numbers(2, 2),
        sketches=numbers(10, 64),
        wgrad=numbers(64),
        probe=numbers(4),
        sampled=SampledRows(torch.rand(2, 4), torch.rand(2, 6)),
    )


def test_parts_come_back_in_place() -> None:
    seen = made()
    before = {k: v.clone() for k, v in vars(seen).items() if isinstance(v, torch.Tensor)}
    parts = seen.parts()
    assert all(part.dtype == torch.float64 for part in parts)
    seen.replace_parts([2 * part for part in parts])
    doubled = {k for k, v in before.items() if torch.equal(vars(seen)[k], 2 * v)}
    assert doubled == set(before) - {"rows", "wgrad"}
