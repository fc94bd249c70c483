"""What an observer of a step gets of every linear."""

from collections import defaultdict
from typing import Any

import torch

from megatron_snip.linears.model import PlannedModel
from megatron_snip.statistics.observer import tap
from megatron_snip.topology import Placement
from tests.models import losses

Seen = dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]
"""X [M, K], W and G [M, N] of every linear (of every expert), by instance, in order."""

ORDER_RTOL = 2e-5
"""GEMMs and norms of two models may be sums in another order."""


class Keeper:
    """An observer that keeps X, W and G."""

    def __init__(self) -> None:
        self.seen: Seen = defaultdict(list)

    def only_counts(self, placement: Placement) -> bool:
        return False

    def observe(
        self,
        placement: Placement,
        input: torch.Tensor,
        weight: torch.Tensor,
        output: torch.Tensor,
        *,
        input_is_split: bool = False,
        output_is_split: bool = False,
        prepare_input: Any = None,
        delayed_scales: Any = None,
    ) -> torch.Tensor:
        assert not (input_is_split or output_is_split)  # on one rank
        rows = input.detach().reshape(-1, input.shape[-1]).clone()
        x = rows if prepare_input is None else prepare_input(rows)

        def on_backward(g: torch.Tensor) -> None:
            found = (x, weight.detach().clone(), g.reshape(-1, g.shape[-1]).clone())
            self.seen[placement.instance].append(found)

        return tap(output, on_backward)


def observed(model: Any, under: PlannedModel, microbatches: int = 2) -> Seen:
    keeper = Keeper()
    with under.runtime.observed_by(keeper):
        assert len(losses(model, microbatches)) == microbatches
    return keeper.seen


def agree(te: Seen, local: Seen) -> None:
    assert set(te) == set(local)
    for instance, each in te.items():
        assert len(each) == len(local[instance])
        for mine, theirs in zip(each, local[instance], strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert a.shape == b.shape
                if b.numel():
                    atol = ORDER_RTOL * b.abs().max().item()
                    torch.testing.assert_close(a, b, rtol=ORDER_RTOL, atol=atol, msg=instance)
