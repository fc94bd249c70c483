"""Exact BF16 weights of a job that stores MXFP8 (`--reuse-grad-buf-for-mxfp8-param-ag`).

In such a job Megatron gathers weights in BF16, in the memory of the gradients, quantizes each of
them into its parameter and zeroes the memory: `_post_param_sync` of a group of buckets, after every
step. It is overridden on the instance, and saves the weights of linears that the plan runs in
another format than they are stored in: 2 bytes an element of these linears, and none of others.

A copy is missing where no gathering has come since a plan needs it: in the first iteration of a
process, and without `--overlap-param-gather` also in the first one under a new plan. Then
SNIP gathers once more (`gather_weights`), from the FP32 weights of the optimizer. So what a linear
multiplies depends on the plan alone, and a resumed run has the bits of one that was not stopped.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

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
        # A layer-wise optimizer gathers without a buffer of parameters.
        buckets = [bucket for group in self._groups for bucket in group.buckets]
        gathered = {id(p) for b in buckets if b.param_data is not None for p in b.params}
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

    @property
    def lacks_copies(self) -> bool:
        """Whether a linear would multiply a dequantized weight in place of an exact one."""
        return any(stored.lacks_exact for _, stored in self._owners.values())

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


def gather_weights(chunks: Sequence[Any], optimizer: Any) -> None:
    """All ranks, between two passes: gather the weights of model chunks, as after a step.

    Nothing is done if the next forward gathers them. Else gradients are zeroed: the weights come in
    their memory, and leave zeros there. The stored weights get the values that they have.

    Args:
        chunks: this rank's model chunks.
        optimizer: Megatron's.
    """
    if any(map(gathers_in_forward, chunks)):
        return
    chunks = [chunk for chunk in chunks if gathers_exact(chunk)]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    stage_weights(optimizer)
    for chunk in chunks:
        groups = bucket_groups(chunk)
        dispatched = [group.param_gather_dispatched for group in groups]
        with torch.no_grad():
            chunk.start_param_sync(force_sync=True)
        for group, was_dispatched in zip(groups, dispatched, strict=True):
            group.param_gather_dispatched = was_dispatched


def stage_weights(optimizer: Any) -> None:
    """Copy this rank's part of the weights to where they are gathered, as Megatron does."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer) and not getattr(part, "is_stub_optimizer", False):
            part._copy_main_params_to_param_buffer()


def gathers_in_forward(chunk: Any) -> bool:
    """Return whether a chunk's next forward gathers weights that share memory with gradients."""
    config: Any = getattr(chunk, "ddp_config", None)
    if not getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        return False
    if not config.overlap_param_gather:
        return False
    # The hooks are removed while weights are already gathered, for example in a first iteration.
    # A graph of the complete iteration gathers without them.
    hooks: Any = getattr(chunk, "remove_forward_pre_hook_handles", {})
    return bool(hooks) or FullCudaGraphWrapper.cuda_graph.get("training") is not None


def gathers_exact(chunk: Any) -> bool:
    """Return whether Megatron gathers a chunk's quantized weights in BF16."""
    return any(map(_gathers_exact, bucket_groups(chunk)))


def bucket_groups(chunk: Any) -> list[Any]:
    """Return the groups of buckets of Megatron's DDP; none for another wrapper."""
    names = ("bucket_groups", "expert_parallel_bucket_groups")
    return [group for name in names for group in getattr(chunk, name, ())]


def _gathers_exact(group: Any) -> bool:
    reuses = getattr(group.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
    return bool(reuses) and hasattr(group, _METHOD)  # Megatron-Core 0.18 and later
