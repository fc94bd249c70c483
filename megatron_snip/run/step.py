"""A forward-backward call that can run again: its data, its loss, its gradients.

The guard repeats a training step; an evaluation in two precisions runs each microbatch twice
(evaluation.py).
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.utils import get_model_config

from megatron_snip.collectives import sum_over
from megatron_snip.linears.te.gathered_weights import gathers_in_forward, stage_weights
from megatron_snip.log import log_failure
from megatron_snip.statistics.gradients import gradient_of
from megatron_snip.statistics.sharded import local
from megatron_snip.topology import Topology

logger = logging.getLogger(__name__)

Results = list[dict[str, Any]]
"""What Megatron's forward-backward function returns."""

ForwardBackward = Callable[..., Results]
"""Megatron's forward-backward function (`get_forward_backward_func()`); keyword arguments only."""

Runner = Callable[..., Results]
"""A function that gets Megatron's forward-backward function and that one's keyword arguments, and
calls it: once, or in two precisions."""


def run_once(function: ForwardBackward, **kwargs: Any) -> Results:
    """Call Megatron's forward-backward function."""
    return function(**kwargs)


class ReplayableIterator(Iterator[Any]):
    """An iterator over `source` that can be rewound to where it started.

    Each pass gets its own copy of a microbatch, with the same tensors in it. Nothing is read ahead.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._taken: list[Any] = []
        self._next = 0

    def __next__(self) -> Any:
        """Return the next microbatch, recorded or new."""
        if self._next == len(self._taken):
            self._taken.append(next(self._source))
        item = self._taken[self._next]
        self._next += 1
        # Megatron's scripts replace the tensors in a microbatch by copies on the device. In a copy,
        # so that the device's tensors are freed when the pass ends, and not kept in `_taken`.
        return _copied_around_tensors(item)

    def rewind(self) -> None:
        """Start again from the first microbatch taken."""
        self._next = 0


def _copied_around_tensors(microbatch: Any) -> Any:
    """Return a copy of a microbatch and of the objects in it, with the same tensors."""
    copied = copy.copy(microbatch)
    # Objects too: Megatron-Bridge's steps replace the images in a microbatch's `visual_inputs`.
    if isinstance(copied, dict):
        for key, value in copied.items():
            if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
                copied[key] = copy.copy(value)
    return copied


@dataclass
class TrainingStep:
    """A forward-backward call, as Megatron is about to make it.

    Megatron gives a data iterator only to the ranks that read data, and None to others. Under
    interleaved pipelines it gives a list, with one for each model chunk.

    Attributes:
        function: Megatron's forward-backward function.
        kwargs: keyword arguments of `function`; `data_iterator` and `model` are among them. Under
            `calculate_per_token_loss` so are `num_microbatches`, `micro_batch_size` and
            `seq_length`.
        may_repeat: whether `run` may be called again. Then the step keeps its microbatches, in the
            memory of the host; else `function` gets the loop's own iterators.
    """

    function: ForwardBackward
    kwargs: dict[str, Any]
    may_repeat: bool = True

    def __post_init__(self) -> None:
        self._has_run = False
        given = self.kwargs["data_iterator"]
        sources = given if isinstance(given, list) else [given]
        self._data = [None if source is None else ReplayableIterator(source) for source in sources]

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The model chunks."""
        model = self.kwargs["model"]
        return list(model) if isinstance(model, list) else [model]

    def run(self) -> Results:
        """Run the forward-backward on the step's data from its start."""
        if not self.may_repeat:
            assert not self._has_run, "its microbatches were not kept"
            self._has_run = True
            return self.function(**self.kwargs)
        for iterator in self._data:
            if iterator is not None:
                iterator.rewind()
        # A list under interleaved pipelines, with one for each model chunk; Megatron checks the
        # type.
        is_list = isinstance(self.kwargs["data_iterator"], list)
        data = list(self._data) if is_list else self._data[0]
        return self.function(**{**self.kwargs, "data_iterator": data})

    def loss_scale(self) -> float:
        """Return the factor of mixed precision that the loss is multiplied by."""
        scale = get_model_config(self.chunks[0]).grad_scale_func
        if scale is None:
            return 1.0
        return float(scale(on_device(torch.ones(1))).item())

    def grad_scale(self, topology: Topology, loss_scale: float) -> float:
        """Return the factor that turns a gradient of the backward into one of the batch-mean loss.

        Args:
            topology: this rank's place.
            loss_scale: what `loss_scale` returned; it waits for the device, so ask once.
        """
        config = get_model_config(self.chunks[0])
        # The data axis has DP * CP ranks. Megatron's schedules divide by the microbatches.
        scale = topology.data.size * loss_scale
        if config.calculate_per_token_loss:
            # Megatron divides after the backward, by the tokens of the batch. Here they are counted
            # as if none were masked, so that ranks need not ask each other. CP ranks share the
            # tokens of a sample.
            samples = self.kwargs["micro_batch_size"] * self.kwargs["num_microbatches"]
            tokens = self.kwargs["seq_length"] * samples
            scale *= tokens / parallel_state.get_context_parallel_world_size()
        return 1.0 / scale


def zero_gradients(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Zero what a forward-backward adds to: gradient buffers (Megatron's DDP) and `.grad`."""
    for chunk in chunks:
        zero: Any = getattr(chunk, "zero_grad_buffer", None)
        if zero is not None:
            zero()
    optimizer.zero_grad()


def prepare_next_pass(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Make ready for another forward-backward of a step, as `train_step` does before each.

    Args:
        chunks: the model's.
        optimizer: Megatron's.
    """
    zero_gradients(chunks, optimizer)
    # With `--reuse-grad-buf-for-mxfp8-param-ag` and `--overlap-param-gather` a forward gathers the
    # weights out of the gradient buffers, where zeroing erased them. Where the forward gathers
    # nothing, the buffers must stay zero: a copy would count as gradients.
    if any(map(gathers_in_forward, chunks)):
        stage_weights(optimizer)


class StepLoss:
    """The loss of a step that has run; made on all ranks together, in the same order.

    Megatron's forward-backward function reports a loss on ranks of the last pipeline stage only, on
    each for its own tokens. It is summed over the ranks of the data axis (DP x CP):

        loss = sum over microbatches and these ranks of (sum of token losses)
               / sum over the same of (number of tokens)

    All ranks hold the same bits, and so decide alike. A report that a rank cannot read is logged
    there, and the step has no loss on any rank.

    The constructor does not wait for the device; `read` does.
    """

    def __init__(self, results: Results, topology: Topology) -> None:
        """Start the sum.

        Args:
            results: what Megatron's function returned on this rank.
            topology: this rank's place.
        """
        self._topology = topology
        self._has_total = False  # whether `_sums` are the last rank's, and no longer this rank's
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._copy_done: torch.cuda.Event | None = None
        own = _step_sums(results)
        if own is None:
            return
        sums = sum_over(own, topology.data.group)
        self._sums = sums.to("cpu", non_blocking=True)
        if sums.is_cuda:
            self._copy_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copy_done.record()

    def read(self) -> float | None:
        """All ranks: wait for the loss, and return it; all ranks get the same.

        None if Megatron's function reports no loss, or a rank could not read its report.
        """
        if not self._has_total:
            self._wait()
            # In every layout of Megatron the last rank is on the last stage, so it has a loss.
            self._topology.control.broadcast_(self._sums, self._topology.world_size - 1)
            self._has_total = True
        return self._loss()

    def read_judged(self, has_finite_gradients: bool) -> float | None:
        """All ranks: return what `read` does, or NaN if a rank has a gradient that is not finite.

        It is one exchange.

        Args:
            has_finite_gradients: whether the gradients of this rank are finite.
        """
        num_failed = torch.tensor([float(not has_finite_gradients)], dtype=torch.float64)
        found = self._topology.control.sum_(torch.cat([self.part(), num_failed]))
        loss = self.take(found[:-1])
        return math.nan if loss is not None and found[-1] else loss

    def part(self) -> torch.Tensor:
        """Return what this rank adds to a sum over all ranks that `take` gets, FP64 [3]."""
        self._wait()
        # Only the last rank adds numbers that are not 0, so the sum has its bits, as in `read`.
        is_last = self._topology.rank == self._topology.world_size - 1
        return self._sums.clone() if is_last else torch.zeros_like(self._sums)

    def take(self, total: torch.Tensor) -> float | None:
        """All ranks: return what `read` does, given the sum of all parts; exchanges nothing."""
        self._sums = total
        self._has_total = True
        return self._loss()

    def _wait(self) -> None:
        """Wait for the device."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
            self._copy_done = None

    def _loss(self) -> float | None:
        total, count, num_unread = self._sums.tolist()
        if num_unread or count == 0.0:
            return None
        return float(total / count)


@torch.no_grad()
def gradients_are_finite(chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether every gradient of this rank is finite."""
    found = (local(gradient_of(weight)) for chunk in chunks for weight in chunk.parameters())
    grads = [grad for grad in found if grad is not None and grad.numel() > 0]
    # The largest magnitude is NaN or infinite if one element is; it makes no mask of the gradient.
    norms = [torch.linalg.vector_norm(grad, ord=math.inf).float() for grad in grads]
    return not norms or bool(torch.isfinite(torch.stack(norms)).all())


def _step_sums(results: Results) -> torch.Tensor | None:
    """Return what a rank adds to a step's loss; None where no loss is reported.

    Returns:
        FP64 [3] on the device: the sum of token losses, the number of tokens, and 1 if this rank
        cannot read its report, else 0.
    """
    try:
        losses = microbatch_losses(results)
        if losses is None:
            return None
        sums = losses.sum(dim=0)
        return torch.cat([sums, sums.new_zeros(1)])
    except Exception as error:  # other data ranks wait for this one
        log_failure(logger, "reading the loss of a step", error)
        return on_device(torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))


def microbatch_losses(results: Results) -> torch.Tensor | None:
    """Return the sum of token losses and the number of tokens of each microbatch.

    Args:
        results: what Megatron's function returned on this rank.

    Returns:
        FP64 [microbatches, 2] on the device; None where no loss is reported.

    Raises:
        ValueError: if a report is neither one number nor two.
    """
    reports = [next(iter(r.values())) for r in results if isinstance(r, dict) and r]
    return torch.stack([_loss_and_tokens(report) for report in reports]) if reports else None


def _loss_and_tokens(reported: Any) -> torch.Tensor:
    """Return one microbatch's [2] FP64 on the device: sum of losses, number of tokens."""
    flat = torch.as_tensor(reported).detach().double().reshape(-1)
    if flat.numel() not in (1, 2):
        raise ValueError(
            f"a microbatch reports {flat.numel()} numbers, not a loss or loss and tokens"
        )
    # Megatron's older form, a mean without a number of tokens, counts as one token.
    return flat if flat.numel() == 2 else torch.stack([flat[0], torch.ones_like(flat[0])])


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on this rank's device."""
    return tensor.cuda() if torch.cuda.is_available() else tensor


@contextmanager
def tolerating_non_finite() -> Iterator[None]:
    """Inside the block Megatron's rerun state machine does not see NaN and infinite results."""
    # The machine would end the job, but the caller can recover.
    validate = RerunStateMachine.validate_result  # patches/install.py checks that it is there

    def validate_finite(self: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        if bool(torch.isfinite(torch.as_tensor(result)).all()):
            validate(self, result, *args, **kwargs)

    RerunStateMachine.validate_result = validate_finite
    try:
        yield
    finally:
        RerunStateMachine.validate_result = validate
