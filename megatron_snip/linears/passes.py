"""Measuring passes: Megatron's own schedule run beside training, leaving no trace.

A pass runs the step's forward-backward function over the first microbatches with gradient
synchronization off. What it touches is put back: RNG states (torch, CUDA, Megatron's tracker,
numpy, random), module buffers, gradients (DDP's buffers are zeroed, as they are at this point of a
training step), the auxiliary losses that Megatron collects for its log, and the schedule hooks in
the model's config. From `prepare` to `finish` DDP's buffers are lent, and zeroed at the end only.
Megatron's rerun state machine does not hear of a pass. Tokens go to the same experts in all passes
of a refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.utils import get_model_config

from megatron_snip.linears.expert_routes import ExpertRoutes
from megatron_snip.linears.replay import ReplayData
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.traces import Traces
from megatron_snip.statistics.refresh import PassResult
from megatron_snip.statistics.tap import Observer
from megatron_snip.topology import Topology

ForwardBackward = Callable[..., list[dict[str, Any]]]
"""Megatron's forward-backward function (`get_forward_backward_func()`); keyword arguments only."""

_HOOKS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")


@dataclass
class TrainingPass:
    """One training step's forward-backward call, as Megatron is about to make it.

    Attributes:
        function: the schedule.
        kwargs: its keyword arguments, with `data_iterator`, `model`, `num_microbatches`.
        data: the step's data, replayable.
    """

    function: ForwardBackward
    kwargs: dict[str, Any]
    data: ReplayData = field(init=False)

    def __post_init__(self) -> None:
        self.data = ReplayData(self.kwargs["data_iterator"])

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The model chunks."""
        model = self.kwargs["model"]
        return list(model) if isinstance(model, list) else [model]

    def train(self) -> list[dict[str, Any]]:
        """Run the training step's own forward-backward on the data from its start."""
        return self.function(**{**self.kwargs, "data_iterator": self.data.from_start()})


class MeasuringPasses:
    """Runs measuring passes over a training step's first microbatches; see `PassRunner`."""

    def __init__(self, training: TrainingPass, runtime: Runtime, wanted_microbatches: int) -> None:
        """Prepare.

        Args:
            training: the step's forward-backward call.
            runtime: of the planned linears.
            wanted_microbatches: how many to use; rounded up to what the interleaved schedule
                accepts and at most the step's own number.
        """
        self._training = training
        self._runtime = runtime
        self._config = get_model_config(training.chunks[0])
        self._count = self._allowed(wanted_microbatches, runtime.topology)
        self._routes = ExpertRoutes(training.chunks, runtime.topology)
        self._lent = False

    @property
    def num_microbatches(self) -> int:
        """Microbatches a data rank in each pass."""
        return self._count

    @property
    def grad_scale(self) -> float:
        """1 / (data ranks * loss scale): Megatron divides by microbatches (and tokens) itself.

        With `calculate_per_token_loss` it divides by the batch's tokens only after the backward;
        then they are counted here, as if none were masked.
        """
        scale = 1.0
        if self._config.grad_scale_func is not None:
            device = next(self._training.chunks[0].parameters()).device
            scale = float(self._config.grad_scale_func(torch.ones(1, device=device)).item())
        if self._config.calculate_per_token_loss:
            kwargs = self._training.kwargs
            samples = kwargs["micro_batch_size"] * self._count
            tokens = kwargs["seq_length"] * samples
            scale *= tokens / parallel_state.get_context_parallel_world_size()
        return 1.0 / (scale * self._runtime.topology.data.size)

    def prepare(self) -> None:
        """All ranks: gather the parameters whose gather overlaps with the forward.

        From here on gradients of planned weights are spare memory (`PlannedLinear.spare`).
        """
        for chunk in self._training.chunks:
            _gather_parameters(chunk)
        self._lent = True

    def finish(self) -> None:
        """Zero gradients, as they are at this point of a training step."""
        self._lent = False
        _zero_gradients(self._training.chunks)

    def run(self, observer: Observer) -> PassResult:
        """All ranks: run one pass under `observer`; see `PassRunner.run`."""
        training = self._training
        kwargs = {
            **training.kwargs,
            "data_iterator": training.data.from_start(),
            "num_microbatches": self._count,
            "forward_only": False,
        }
        with (
            _no_trace(training.chunks, self._config, self._lent),
            self._routes.watched(observer) as watched,
            self._runtime.observing(watched),
        ):
            results = training.function(**kwargs)
        return _losses(results, self._runtime.topology)

    def _allowed(self, wanted: int, topology: Topology) -> int:
        available = int(self._training.kwargs["num_microbatches"])
        group = 1
        if len(self._training.chunks) > 1:
            group = self._config.microbatch_group_size_per_vp_stage or topology.num_stages
        return min(available, -(-wanted // group) * group)


@contextmanager
def _no_trace(chunks: Sequence[Any], config: Any, lent: bool) -> Iterator[None]:
    """Put back all that a forward-backward changes, at the end of the block; lent memory apart."""
    with ExitStack() as stack:
        stack.enter_context(_kept_traces(chunks))
        stack.enter_context(_kept_gradients(chunks, lent))
        stack.enter_context(_without_hooks(config))
        stack.enter_context(_unvalidated())
        for chunk in chunks:
            if not lent:  # `prepare` has; again, it might go through the gradients' memory
                _gather_parameters(chunk)
            if hasattr(chunk, "no_sync"):
                stack.enter_context(chunk.no_sync())
        yield


@contextmanager
def _kept_traces(chunks: Sequence[Any]) -> Iterator[None]:
    """Keep random streams, modules' buffers and the losses collected for the log."""
    traces = Traces(chunks)
    try:
        yield
    finally:
        traces.restore()


@contextmanager
def _kept_gradients(chunks: Sequence[Any], lent: bool) -> Iterator[None]:
    """Keep `.grad`, and zero DDP's buffers, in which gradients end up in its place, unless lent."""
    grads = [(p, p.grad) for chunk in chunks for p in chunk.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        if not lent:
            _zero_gradients(chunks)


def _zero_gradients(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()


@contextmanager
def _without_hooks(config: Any) -> Iterator[None]:
    hooks = {name: getattr(config, name) for name in _HOOKS if hasattr(config, name)}
    for name in hooks:
        setattr(config, name, None)
    try:
        yield
    finally:
        for name, hook in hooks.items():
            setattr(config, name, hook)


@contextmanager
def _unvalidated() -> Iterator[None]:
    """Keep a pass's losses from the rerun state machine.

    It counts validations within a step (a repeated step measures nothing, so counts would differ),
    remembers the largest loss, and ends the job for a NaN; the probe is no business of its.
    """
    machine = getattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
    if machine is None:  # nobody validates; asking for the machine would create one
        yield
        return
    machine.validate_result = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del machine.validate_result


def _gather_parameters(chunk: Any) -> None:
    """Finish an overlapped parameter all-gather, so that weights may be read and changed."""
    if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
        chunk.start_param_sync(force_sync=True)


def _losses(results: list[dict[str, Any]], topology: Topology) -> PassResult:
    """Sum the microbatch losses that this rank computed; tensor rank 0 speaks for its group."""
    if topology.tensor.rank != 0:
        return PassResult(0.0, 0)
    values = [_loss_value(next(iter(r.values()))) for r in results if isinstance(r, dict) and r]
    return PassResult(sum(values), len(values))


def _loss_value(reported: Any) -> float:
    """Read Megatron's reported loss: a scalar, or (sum over tokens, number of tokens)."""
    if isinstance(reported, tuple | list):
        reported = torch.stack([torch.as_tensor(v, dtype=torch.float32) for v in reported])
    tensor = torch.as_tensor(reported).detach().float().reshape(-1)
    if tensor.numel() == 2:
        return float(tensor[0] / tensor[1].clamp(min=1))
    return float(tensor[0])


@contextmanager
def tolerating_non_finite() -> Iterator[None]:
    """Within: results that are NaN or infinite do not reach the rerun state machine.

    It would end the job, and whoever opens this block has another remedy; finite results are
    validated as ever.
    """
    machine = getattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
    if machine is None:
        yield
        return
    validate = machine.validate_result

    def validate_finite(result: Any, *args: Any, **kwargs: Any) -> None:
        if bool(torch.isfinite(torch.as_tensor(result)).all()):
            validate(result, *args, **kwargs)

    machine.validate_result = validate_finite
    try:
        yield
    finally:
        del machine.validate_result
