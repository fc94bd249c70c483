"""Exact BF16 weights of a job that stores MXFP8 (`--reuse-grad-buf-for-mxfp8-param-ag`).

In such a job Megatron gathers weights in BF16, in the memory of the gradients, quantizes each of
them into its parameter and zeroes the memory: `_post_param_sync` of a group of buckets, after every
step. It is overridden on the instance, and saves the weights of linears that the plan runs in
another format than they are stored in: 2 bytes an element of these linears, and none of others.

Before the first gathering under a new plan a linear multiplies the dequantized weight. That is the
first iteration under the plan; with `--overlap-param-gather` Megatron gathers in the forward, so it
is only the first iteration of a resumed job, in which Megatron leaves the gathering out.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megatron_snip.linears.te.stored_weight import StoredWeights

_METHOD = "_post_param_sync"


class GatheredWeights:
    """Saves exact weights for the linears of one model chunk."""

    def __init__(self, chunk: Any, stored: Iterable[StoredWeights]) -> None:
        """Find the groups of buckets; the stored weights that are in one get exact copies.

        Args:
            chunk: a model chunk, as Megatron's DDP wraps it.
            stored: the stored weights of its linears.
        """
        self._groups = [group for group in bucket_groups(chunk) if _gathers_exact(group)]
        gathered = {id(p) for group in self._groups for p in _parameters(group)}
        self._owners: dict[int, tuple[torch.nn.Parameter, StoredWeights]] = {}
        for each in stored:
            each.gets_exact = all(id(weight) in gathered for weight in each.weights)
            if each.gets_exact:
                self._owners |= {id(weight): (weight, each) for weight in each.weights}

    def install(self) -> None:
        """Override the groups' method; idempotent."""
        for group in self._groups:
            if _METHOD not in group.__dict__:
                setattr(group, _METHOD, self._saving(group, getattr(group, _METHOD)))

    def uninstall(self) -> None:
        """Restore the class's method."""
        for group in self._groups:
            group.__dict__.pop(_METHOD, None)

    def _saving(self, group: Any, original: Callable[[], None]) -> Callable[[], None]:
        def save_and_quantize() -> None:
            for bucket in group.buckets:
                self._save(bucket)
            original()

        return save_and_quantize

    def _save(self, bucket: Any) -> None:
        if bucket.param_data is None:
            return
        gathered = bucket.param_data.view(-1)
        for parameter in bucket.params:
            weight, stored = self._owners.get(id(parameter), (None, None))
            if weight is not None and stored is not None and stored.keeps_copies:
                start, end = bucket.param_to_index[parameter]
                stored.save_exact(weight, gathered[start:end])


def bucket_groups(chunk: Any) -> list[Any]:
    """Return the groups of buckets of Megatron's DDP; none for another wrapper."""
    names = ("bucket_groups", "expert_parallel_bucket_groups")
    return [group for name in names for group in getattr(chunk, name, ())]


def _gathers_exact(group: Any) -> bool:
    reuses = getattr(group.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
    return bool(reuses) and hasattr(group, _METHOD)  # Megatron-Core 0.18 and later


def _parameters(group: Any) -> Iterator[torch.nn.Parameter]:
    for bucket in group.buckets:
        yield from bucket.params
