"""What observers see of Transformer Engine's linears is what they see of Megatron's own.

Same weights, same data; what the stand-in computes forward and backward is plain PyTorch, so X, W
and G differ by the order of sums alone. Statistics are functions of the three; that those of a
whole refresh agree too, on ranks that share tokens and weights, is tested with the trainer in
tests/distributed/test_te.py.
"""

from collections import defaultdict
from typing import Any

import pytest
import torch

from megatron_snip.linears.model import PlannedModel
from megatron_snip.statistics.observer import tap
from megatron_snip.topology import Placement
from tests.te.models import EXPERTS, build, copy_weights, losses, planned

Seen = dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]
"""X [M, K], W and G [M, N] of every linear (of every expert), by instance, in order."""

RTOL = 2e-5


class Keeper:
    """An observer that keeps X, W and G."""

    def __init__(self) -> None:
        self.seen: Seen = defaultdict(list)

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


def both(change: Any = None, grouped: bool = False, **changes: Any) -> tuple[Seen, Seen]:
    te, local = build(grouped=grouped, **changes), build(te=False, **changes)
    copy_weights(te, local)
    for model in (te, local) if change is not None else ():
        change(model)
    return observed(te, planned(te)), observed(local, planned(local))


def agree(te: Seen, local: Seen) -> None:
    assert set(te) == set(local)
    for instance, each in te.items():
        assert len(each) == len(local[instance])
        for mine, theirs in zip(each, local[instance], strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert a.shape == b.shape
                if b.numel():
                    atol = RTOL * b.abs().max().item()
                    torch.testing.assert_close(a, b, rtol=RTOL, atol=atol, msg=instance)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalization": "LayerNorm"},
        {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
        {"num_query_groups": 1, "layernorm_zero_centered_gamma": False},
        EXPERTS,
        {**EXPERTS, "grouped": True},
    ],
    ids=["RMSNorm", "LayerNorm", "ungated", "grouped queries", "sequential", "grouped experts"],
)
def test_observers_see_what_they_see_of_megatrons_own_linears(changes: dict[str, Any]) -> None:
    te, local = both(**changes)
    assert len(te) == (20 if "num_moe_experts" in changes else 8)
    assert {len(each) for each in te.values()} == {2}
    agree(te, local)


def all_tokens_alike(model: Any) -> None:
    """Then the router gives all of them the same two of four experts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("pre_mlp_layernorm.weight"):
                parameter.zero_()
            if name.endswith("pre_mlp_layernorm.bias"):
                parameter.fill_(1.0)


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_without_tokens_show_no_rows(grouped: bool) -> None:
    changes = {**EXPERTS, "normalization": "LayerNorm", "grouped": grouped}
    te, local = both(all_tokens_alike, **changes)
    agree(te, local)
    for layer in range(2):
        for module in ("linear_fc1", "linear_fc2"):
            prefix = f"decoder.layers.{layer}.mlp.experts.{module}"
            each = [te[instance] for instance in te if instance.startswith(prefix)]
            sizes = sorted(tuple(len(x) for x, _, _ in microbatches) for microbatches in each)
            assert sizes == [(0, 0), (0, 0), (32, 32), (32, 32)]
