"""One microbatch forward, and the loss that all ranks agree on.

The loss of a microbatch is the mean over its tokens; of a step, the mean over microbatches and
data-parallel ranks, which all hold equally many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

LOSS = "lm loss"
"""Megatron's name of the language-model loss."""

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, LossFunction]:
    """Run one microbatch through a model chunk, as Megatron's schedules ask for it.

    Args:
        data_iterator: yields tokens, labels, position_ids and loss_mask, each [b, s].
        model: a chunk; stages in the middle take their input from the stage before.

    Returns:
        The chunk's output (per-token losses [b, s] on the last stage), and the loss function.
    """
    batch = {key: value.cuda() for key, value in next(data_iterator).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_token_losses, batch["loss_mask"])


def _token_losses(
    mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (sum of losses, number of tokens, what to report); Megatron divides."""
    flat = mask.view(-1).float()
    total = torch.sum(output.float().view(-1) * flat)
    tokens = flat.sum().to(torch.int)
    report = torch.stack([total.detach(), tokens.to(total.dtype)])
    return total, tokens, {LOSS: report}


def mean_loss(reports: list[dict[str, Any]]) -> float:
    """All ranks: return the loss over microbatches and data-parallel ranks, the same everywhere.

    Args:
        reports: what the schedule returned; empty but on the last pipeline stage.
    """
    total = torch.zeros(2, dtype=torch.float64).to(torch.cuda.current_device())
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        for report in reports:
            total += report[LOSS].double()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(total, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return float(total[0] / total[1])
