"""The parts that travel over tensor-parallel ranks come back where they were."""

import torch

from megatron_snip.statistics.observation import Observation


def made(probed: bool) -> Observation:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64)

    seen = Observation(
        3,
        torch.tensor([1, 4]),
        numbers(2),
        numbers(5),
        numbers(2, 5),
        numbers(2, 9),
        numbers(9),
        numbers(2, 2),
        torch.rand(2, 4),
        torch.rand(2, 6),
    )
    if probed:
        seen.probe_grad, seen.probe_input = numbers(2), numbers(2)
    return seen


def test_parts_come_back_in_place() -> None:
    seen = made(probed=True)
    before = {k: v.clone() for k, v in vars(seen).items() if isinstance(v, torch.Tensor)}
    parts = seen.parts()
    assert all(part.dtype == torch.float64 for part in parts)
    seen.replace_parts([2 * part for part in parts])
    doubled = {k for k, v in before.items() if torch.equal(vars(seen)[k], 2 * v)}
    assert doubled == set(before) - {"rows", "input_rows", "grad_rows"}


def test_what_was_not_probed_takes_part_as_zeros() -> None:
    """All ranks bring as many numbers, whether or not their probe got that far."""
    seen, probed = made(probed=False), made(probed=True)
    assert [p.shape for p in seen.parts()] == [p.shape for p in probed.parts()]
    seen.replace_parts(seen.parts())
    assert seen.probe_grad is not None
    assert seen.probe_grad.abs().max() == 0
