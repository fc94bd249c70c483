"""Delayed scaling in simulated linears: scales from the largest magnitudes of earlier microbatches.

Transformer Engine keeps a history of magnitudes in each module. Its autocast updates all histories
when the forward of a microbatch ends, and those of gradients when its backward ends. Here a linear
notes the magnitudes of X, W and G as it quantizes them, and all that was noted is added to the
histories when the first linear is called for another microbatch, or the iteration ends. No linear
reads a scale between these two points in time, so every scale is Transformer Engine's:

    amax = largest of the history (`max`) or its newest entry (`most_recent`)
    scale = largest number of the element type / 2^margin / amax

The flags are those of Megatron's delayed scaling: --fp8-amax-history-len, --fp8-amax-compute-algo,
--fp8-margin and --tp-only-amax-red. Magnitudes are the largest of all ranks that Transformer Engine
shares them with. As there, tensors that are zero or were not quantized leave their history as it
is; an amax that is not finite is in the history and makes no scale; a linear starts with scale 1.

Where Transformer Engine differs: a tensor with NaN elements is not noted; an evaluation notes
nothing; an iteration that runs again starts from the history that it started from.
"""

import base64
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_snip.errors import UsageError
from megatron_snip.formats import Format
from megatron_snip.quantizers.quantize import operand_format
from megatron_snip.quantizers.reference import amax_of
from megatron_snip.topology import Placement
from megatron_snip.types import Operand

_OPERANDS = list(Operand)
_FORWARD = slice(0, 2)
"""X and W among X, W and G."""
_BACKWARD = slice(2, 3)
_LARGEST_SCALE = torch.finfo(torch.float32).max


@dataclass
class DelayedCall:
    """One forward of a linear, and its backward.

    Attributes:
        scaling: has the histories.
        column: the linear's column there.
        fmt: the linear's format.
        forward_scales: scales [2] of X and W, FP32.
        notes_forward: whether the magnitudes of X and W count; not in an evaluation, and only once
            for a forward that is recomputed.
    """

    scaling: "DelayedScaling"
    column: int
    fmt: Format
    forward_scales: Tensor
    notes_forward: bool
    _noted: set[Operand] = field(default_factory=set)

    def scale(self, operand: Operand, tensor: Tensor) -> Tensor:
        """Return an operand's scale, an FP32 scalar, and note its largest magnitude once.

        Args:
            operand: which operand of the linear.
            tensor: the operand, or this rank's part of it.
        """
        is_gradient = operand is Operand.GRAD_OUTPUT
        # G's is found before that of this microbatch is noted.
        scales = self.scales(self.fmt) if is_gradient else self.forward_scales
        if operand not in self._noted and (is_gradient or self.notes_forward):
            self._noted.add(operand)
            self.scaling.note(self.column, operand, tensor)
        return scales[_OPERANDS.index(operand)]

    def scales(self, fmt: Format) -> Tensor:
        """All ranks: return the scales [3] of X, W and G, FP32; G's is that of the next backward.

        Args:
            fmt: the linear's format, or another one with delayed scaling.
        """
        scaling = self.scaling
        scaling.update(_BACKWARD, self.column)
        gradient = scaling.scales(self.column, fmt)[_BACKWARD]
        return torch.cat([self.forward_scales, gradient])


class DelayedScaling:
    """The histories of all simulated linears of this rank; empty until one runs delayed scaling."""

    def __init__(self) -> None:
        """Start without linears."""
        self._columns: dict[str, int] = {}  # by Placement.instance
        self._config: Any = None
        # Of X, W and G: the newest amax, which is not complete yet, and then the oldest first.
        self._history: Tensor | None = None  # [length, 3, linears], FP32
        self._amax: Tensor  # [3, linears], FP32: what scales are made of; 0 is a scale of 1
        self._limits: dict[Format, Tensor] = {}
        # Columns with a new amax, of X and W (start 0) and of G (start 2).
        self._noted: dict[int, set[int]] = {0: set(), 2: set()}
        # Scales of forwards that will be recomputed, by column.
        self._recomputed: dict[int, deque[Tensor]] = defaultdict(deque)
        self._iteration: int | None = None
        self._at_start: tuple[Tensor, Tensor] | None = None
        self._loaded: dict[str, str] = {}

    def add(self, placement: Placement) -> None:
        """Add a linear, before any of them runs; on all ranks in the same order."""
        self._columns.setdefault(placement.instance, len(self._columns))

    def begin_iteration(self, iteration: int) -> None:
        """Begin a training pass; one of the same iteration starts from the same history."""
        if iteration != self._iteration:
            self._iteration = iteration
            self._at_start = None
            if self._history is not None:
                self._at_start = self._history.clone(), self._amax.clone()
        elif self._history is not None:
            history, amax = self._at_start or self._initial(self._history.device)
            self._history.copy_(history)
            self._amax.copy_(amax)
        for columns in self._noted.values():
            columns.clear()
        self._recomputed.clear()

    def end_iteration(self) -> None:
        """All ranks: bring the histories up to date: they are then the same on ranks that share."""
        for operands in (_FORWARD, _BACKWARD):
            if self._noted[operands.start]:
                self._add_noted(operands)

    def begin_call(
        self,
        placement: Placement,
        fmt: Format,
        config: Any,
        device: torch.device,
        in_training: bool,
    ) -> DelayedCall:
        """All ranks: begin a linear's forward.

        Args:
            placement: which linear.
            fmt: its format; the scale type is DELAYED.
            config: Megatron's TransformerConfig.
            device: of the linear.
            in_training: whether an iteration's forward-backward runs.
        """
        if self._history is None:
            self._config = config
            self._history, self._amax = self._initial(device)
        column = self._columns[placement.instance]
        is_recomputing = torch._C._current_graph_task_id() != -1  # this thread runs a backward
        if is_recomputing and self._recomputed[column]:
            scales = self._recomputed[column].popleft()
            return DelayedCall(self, column, fmt, scales, notes_forward=False)
        # Without gradients an evaluation runs, or a forward that will be recomputed.
        has_gradients = torch.is_grad_enabled()
        counts = (has_gradients or in_training) and not is_recomputing
        if counts:
            self.update(_FORWARD, column)
        scales = self.scales(column, fmt)[_FORWARD]
        if counts and not has_gradients:
            self._recomputed[column].append(scales)
        return DelayedCall(self, column, fmt, scales, notes_forward=counts)

    def scales(self, column: int, fmt: Format) -> Tensor:
        """Return the scales [3] of X, W and G that the history gives a linear, FP32."""
        amax = self._amax[:, column]
        if fmt not in self._limits:
            elements = (operand_format(fmt, operand).element for operand in _OPERANDS)
            margin = 2.0 ** -int(self._config.fp8_margin)
            limits = [element.max_value * margin for element in elements if element is not None]
            self._limits[fmt] = torch.tensor(limits).to(amax.device)
        scales = (self._limits[fmt] / amax).clamp(max=_LARGEST_SCALE)
        return torch.where(amax > 0, scales, 1.0)

    def note(self, column: int, operand: Operand, tensor: Tensor) -> None:
        """Note the largest magnitude of an operand of the microbatch."""
        assert self._history is not None
        index = _OPERANDS.index(operand)
        newest = self._history[0, index, column]
        amax = torch.nan_to_num(amax_of(tensor.detach()), nan=0.0, posinf=torch.inf)
        newest.copy_(torch.maximum(newest, amax))
        self._noted[_BACKWARD.start if index == _BACKWARD.start else 0].add(column)

    def update(self, operands: slice, column: int) -> None:
        """All ranks: if a linear has noted an amax, another microbatch begins: update all."""
        if column in self._noted[operands.start]:
            self._add_noted(operands)

    def _add_noted(self, operands: slice) -> None:
        """All ranks: end the microbatch: move the histories on, and take what scales are made of.

        Every linear has a column of its own, and one that has noted nothing stays as it is.
        """
        self._noted[operands.start].clear()
        assert self._history is not None
        history = self._history[:, operands]
        newest = history[0].clone()
        group = _sharing_group(self._config)
        if group is not None:
            dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)
        moved = torch.cat([history[1:], newest[None]])
        is_most_recent = self._config.fp8_amax_compute_algo == "most_recent"
        found = newest if is_most_recent else moved.amax(dim=0)
        moved[0].zero_()  # an assignment would wait for the device
        was_noted = newest != 0
        history.copy_(torch.where(was_noted, moved, history))
        amax = self._amax[operands]
        amax.copy_(torch.where(was_noted & found.isfinite(), found, amax))

    # ---- checkpoints ----------------------------------------------------------------------------

    def state_dict(self, before_iteration: bool = False) -> dict[str, str]:
        """Return the linears' histories, by `Placement.instance`; it waits for the device.

        Each is FP32 [1 + length, 3] in base64: what scales are made of, and the history.

        Args:
            before_iteration: return those that the last iteration started from.
        """
        now = None if self._history is None else (self._history, self._amax)
        found = self._at_start if before_iteration else now
        if found is None:
            return dict(self._loaded)
        history, amax = found
        values = torch.cat([amax[None], history]).cpu().numpy().astype("<f4")
        return {
            name: base64.b64encode(values[:, :, column].tobytes()).decode()
            for name, column in self._columns.items()
            if values[:, :, column].any()
        }

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Continue from a checkpoint; linears of other ranks may be in it.

        Raises:
            UsageError: if it is damaged.
        """
        for name, text in state.items():
            try:
                _decoded(text)
            except ValueError as error:
                raise UsageError(
                    f"SNIP state of the checkpoint is damaged: delayed_scaling: {name}: {error}; "
                    "load another checkpoint"
                ) from None
        self._loaded = dict(state)

    def _initial(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the histories and amaxes that a linear starts with, or had in the checkpoint."""
        length = int(self._config.fp8_amax_history_len)
        history = np.zeros((length, 3, len(self._columns)), np.float32)
        amax = np.zeros((3, len(self._columns)), np.float32)
        for name, text in self._loaded.items():
            if name in self._columns:
                column = self._columns[name]
                amax[:, column], *past = _decoded(text)
                num_kept = min(length, len(past)) - 1  # the flag may have changed
                if num_kept:
                    history[-num_kept:, :, column] = past[-num_kept:]
        return torch.from_numpy(history).to(device), torch.from_numpy(amax).to(device)


def _sharing_group(config: Any) -> dist.ProcessGroup | None:
    """Return the ranks that share magnitudes; None if this rank shares them with no other."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    group: dist.ProcessGroup = parallel_state.get_amax_reduction_group(
        with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red
    )
    return group if group.size() > 1 else None


def _decoded(text: str) -> "np.ndarray[Any, Any]":
    """Return [1 + length, 3] of a linear's state.

    Raises:
        ValueError: if it is damaged.
    """
    values = np.frombuffer(base64.b64decode(text, validate=True), "<f4").reshape(-1, 3)
    if len(values) < 2:
        raise ValueError(f"{len(values)} rows; at least 2 are needed")
    return values
