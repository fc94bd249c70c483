"""StepObserver: watches the linears of one training iteration and adds up what `measure.py` finds.

The forward stores a sample of the input's tokens. A tap on the linear's output measures in the
backward, when the gradient of the output is there. The tap is an identity in both directions. It
sits on what the linear's own GEMM returns, before any reduction over tensor-parallel ranks: the
backward of that reduction gives every rank the full gradient. Training itself is not changed:
nothing is replayed, perturbed or restored. Ranks of a tensor axis exchange their sums within the
backward, in the same order on all of them even if one fails to measure: that rank contributes
zeros, and `table` raises on all ranks. Nothing waits for the device before `table`, except MoE
layers, which exchange how many tokens each expert gets.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.collectives import sum_over
from megatron_snip.quantizers.quantize import needs_tensor_amax, rotated_amax
from megatron_snip.quantizers.reference import amax_of
from megatron_snip.quantizers.stochastic import grad_output_stream
from megatron_snip.statistics.health import ERROR_SUMS, EXPERT_COLUMNS
from megatron_snip.statistics.health_table import HealthTable
from megatron_snip.statistics.measure import (
    Operands,
    PartialSums,
    TensorNumbers,
    partial_sums,
    totals,
)
from megatron_snip.statistics.optimizer_state import NORMS, Sensitivity
from megatron_snip.statistics.records import COLUMNS, StatisticsTable
from megatron_snip.statistics.reduce import RankSums, reduce_sums, table_columns
from megatron_snip.statistics.sample import (
    MeasureSettings,
    Sample,
    draw_sample,
    rows_of,
    sampled_features,
    to_device,
)
from megatron_snip.topology import Axis, LinearInfo, Placement, Topology
from megatron_snip.types import Operand

T = TypeVar("T")


RowsBySender = Mapping[int, Tensor]
"""Data rank -> its rows in a linear's input: int64 [R] on the CPU, in the sender's order."""


def tap(output: Tensor, on_backward: Callable[[Tensor], None]) -> Tensor:
    """Return `output`; its backward calls `on_backward(grad_output)` once."""
    tapped = output.view_as(output)  # the linear's own output may have other users
    tapped.register_hook(on_backward)  # type: ignore[no-untyped-call]
    return tapped


@dataclass(frozen=True)
class _Call:
    """One forward of a linear.

    Attributes:
        placement: the linear.
        weight: returns W [N, K] of this shard; called while it is measured.
        num_inputs: K.
        token_axis: the ranks over which its tokens are split, where they are.
        input_is_split, output_is_split, prepare_input, delayed_scales: see `StepObserver.observe`.
    """

    placement: Placement
    weight: Callable[[], Tensor]
    num_inputs: int
    token_axis: Axis
    input_is_split: bool
    output_is_split: bool
    prepare_input: Callable[[Tensor], Tensor] | None
    delayed_scales: Callable[[], Tensor] | None


class StepObserver:
    """Observes one iteration; the linears call `observe` on every rank.

    Attributes:
        seconds: that this rank's host has spent on sampling, in the taps and in `table`.
    """

    def __init__(
        self,
        settings: MeasureSettings,
        topology: Topology,
        sensitivities: Mapping[Placement, Sensitivity],
        rows_by_sender: Callable[[Placement, int], RowsBySender | None] = lambda *_: None,
    ) -> None:
        """Start with nothing observed.

        Args:
            settings: what to observe.
            topology: this rank's place.
            sensitivities: D by weight; a weight that is missing has D = 1.
            rows_by_sender: returns the rows of a linear's input by sender, or None if all are one
                microbatch of this rank's.
        """
        self.seconds = 0.0
        self._settings = settings
        self._topology = topology
        self._sensitivities = sensitivities
        self._rows_by_sender = rows_by_sender
        self._columns = {c: COLUMNS[c.rpartition(".")[2]] for c in table_columns(settings.formats)}
        self._needs_amax = any(map(needs_tensor_amax, settings.formats.values()))
        rotating = [f for f in settings.formats.values() if f.wgrad_hadamard]
        self._rotation = next(filter(needs_tensor_amax, rotating), None)
        self._num_forwards: dict[Placement, int] = defaultdict(int)
        self._own = RankSums()
        self._seen: set[Placement] = set()
        self._draw = cache(partial(draw_sample, settings))  # a microbatch's tokens, for all linears

    def restart(self) -> None:
        """Forget what was observed: the training pass is repeated."""
        self._num_forwards.clear()
        self._own = RankSums()
        self._seen.clear()

    def observe(
        self,
        placement: Placement,
        input: Tensor,
        weight: Tensor | Callable[[], Tensor],
        output: Tensor,
        *,
        input_is_split: bool = False,
        output_is_split: bool = False,
        prepare_input: Callable[[Tensor], Tensor] | None = None,
        delayed_scales: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Return `output`, possibly with a tap on it.

        Args:
            placement: which linear this is.
            input: [tokens, K] or [s, b, K], as given to the linear.
            weight: [N, K], this rank's shard; or what returns it in the backward, for a weight that
                is stored in another form. No more than one is held at a time.
            output: what the linear's GEMM gave.
            input_is_split: the rows are this rank's share of the tokens, which the linear gathers
                over its tensor axis (sequence parallelism).
            output_is_split: likewise of the output's rows.
            prepare_input: returns what the GEMM multiplies for rows of `input` (a fused norm).
            delayed_scales: returns the scales [3] of X, W and G that a linear under delayed scaling
                has at the time, FP32; those of X and W are read in the forward.
        """
        if (names := self._settings.names) is not None and placement.name not in names:
            return output
        if not (torch.is_grad_enabled() and output.requires_grad):
            return output  # an evaluation, or a forward that is recomputed later
        # Under sequence parallelism each rank has its own tokens of a replicated weight.
        is_replicated = input_is_split and placement.tensor.size == 1
        token_axis = self._topology.tensor if is_replicated else placement.tensor
        splits = input_is_split, output_is_split
        read = weight if callable(weight) else weight.detach
        features = input.shape[-1]
        call = _Call(placement, read, features, token_axis, *splits, prepare_input, delayed_scales)
        with torch.no_grad(), self._timed():
            samples = self._samples(call, input.detach())

        def on_backward(grad: Tensor) -> None:
            # The CPU patch looks at every call of torch in Python; here is nothing to redirect.
            with torch.no_grad(), self._timed(), torch._C.DisableTorchFunction():
                flat = grad.detach().reshape(-1, grad.shape[-1])
                for sample in samples:
                    self._measure(call, sample, flat)

        return tap(output, on_backward)

    def table(
        self,
        linears: Sequence[LinearInfo],
        grad_scale: float,
        loss: float | None,
        norms: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> tuple[StatisticsTable, HealthTable]:
        """All ranks: add up over ranks; see `reduce_sums` for arguments and errors."""
        control = self._topology.control
        with self._timed():
            return reduce_sums(self._own, self._settings, linears, grad_scale, loss, norms, control)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin

    def _samples(self, call: _Call, input: Tensor) -> list[Sample]:
        """Keep the sampled tokens of a linear's input, by sender; communicates nothing."""
        placement = call.placement
        forward = self._num_forwards[placement]
        self._num_forwards[placement] += 1
        x = input.reshape(-1, input.shape[-1])
        num_tokens = x.shape[0] * (call.token_axis.size if call.input_is_split else 1)
        data, parts = self._topology.data, self._rows_by_sender(placement, num_tokens)
        if parts is None:
            data = self._topology.data_axis(placement)
            parts = {data.rank: torch.arange(num_tokens)}
        samples = []
        for data_rank, rows in parts.items():
            drawn = self._draw(len(rows), forward * data.size + data_rank)
            sample = replace(drawn, rows=rows[drawn.rows])
            self._try(placement, self._keep, call, sample, x)
            samples.append(sample)
        return samples

    def _keep(self, call: _Call, sample: Sample, x: Tensor) -> None:
        """Put the sampled rows of X [tokens, K] into the sample."""
        prepare = call.prepare_input
        if self._needs_amax:
            x, prepare = (x if prepare is None else prepare(x)), None
            sample.input_amax = amax_of(x)
        if self._rotation is not None:
            sample.rotated_amax = rotated_amax(x, self._rotation)
        if call.delayed_scales is not None:
            sample.forward_scales = call.delayed_scales()[:2].clone()
        rows = rows_of(x, sample.rows, call.input_is_split, call.token_axis)
        sample.input = rows if prepare is None else prepare(rows)

    def _measure(self, call: _Call, sample: Sample, grad: Tensor) -> None:
        """All ranks of the tensor axis: measure one linear on one microbatch."""
        placement, settings = call.placement, self._settings
        weight = self._try(placement, call.weight)
        if weight is None:
            weight = grad.new_zeros((grad.shape[-1], call.num_inputs))
        formats, axis, single = settings.formats, placement.tensor, sample.num_single
        count, x, rows = len(sample.rows), sample.input, sample.rows
        g = self._try(placement, rows_of, grad, rows, call.output_is_split, call.token_axis)
        # A rank that fails takes part in what its peers exchange, with zeros.
        x = weight.new_zeros((count, weight.shape[1])) if x is None else x
        g = weight.new_zeros((count, weight.shape[0])) if g is None else g
        if call.input_is_split:
            x = sum_over(x, call.token_axis.group)
        if call.output_is_split:
            g = sum_over(g, call.token_axis.group)
        numbers = self._tensor_numbers(call, sample, weight, grad)
        stream = grad_output_stream(settings.seed, placement, settings.iteration, sample.microbatch)
        first = sample.first_feature
        features = self._try(placement, sampled_features, stream, weight.shape[0], first)
        features = features or slice(None)
        operands = Operands(
            x[:single], weight, g[:single], x[single:], g[single:, features], numbers
        )
        d = self._sensitivities.get(placement)
        given = operands, placement.kind, axis.size, formats, stream, d, features
        sums = self._try(placement, partial_sums, *given)
        if sums is not None:
            largest = self._own.amax.get(placement.name, sums.amax)
            self._own.amax[placement.name] = torch.maximum(largest, sums.amax)
        if axis.group is not None:
            if sums is None:
                sums = PartialSums.zeros(placement.kind, single, weight, formats)
            sums = sums.summed(axis.group)
        if sums is not None and axis.rank == 0:
            self._try(placement, self._add, call, sample, sums, g[:single], features)

    def _try(self, placement: Placement, action: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of `action`; None if measuring has failed: training must go on."""
        if self._own.failure is None:
            try:
                return action(*arguments)
            except Exception as error:
                self._own.record_failure(error, f"{placement.name}: ")
        return None

    def _add(
        self, call: _Call, sample: Sample, sums: PartialSums, grad: Tensor, features: slice
    ) -> None:
        """Add one microbatch's sums to its linear's row; `grad` is G of the sample."""
        placement, name = call.placement, call.placement.name
        found = totals(sums, placement.kind, grad, self._settings.formats)
        health = sums.health
        share = 1.0 / self._topology.context  # of a microbatch: context ranks divide its tokens
        known = {"microbatches": share, "tokens": float(sample.num_tokens)}
        if placement not in self._seen and self._topology.data_axis(placement).rank == 0:
            sensitivity = self._sensitivities.get(placement)
            known["update_square"] = 0.0 if sensitivity is None else sensitivity.update_square
        self._seen.add(placement)
        columns = self._columns
        tokens, tiles = sample.expansions
        tiles *= features.step or 1
        expansion = {"tokens": tokens, "tiles": tiles, "weight": share, "all": 1.0}
        numbers = [
            [expansion[column.over] for column in columns.values()],
            [known.get(c, 0.0) for c in columns],
        ]
        factors, added = to_device(grad.device, torch.tensor(numbers, dtype=torch.float64))
        zero = torch.zeros_like(added[0])
        row = torch.stack([found.get(c, zero) for c in columns]) * factors + added
        scales = torch.tensor([[tokens], [share], [tokens]], dtype=torch.float64)
        health = health.double() * to_device(grad.device, scales)
        if (expert := placement.expert) is not None:
            expert_sums = torch.stack([row[list(columns).index(c)] for c in EXPERT_COLUMNS])
            row_of_expert = torch.cat([expert_sums, health[:-1, :, :ERROR_SUMS].flatten()])
            _add_to(self._own.experts, (name, expert), row_of_expert)
        _add_to(self._own.rows, name, torch.cat([row, row.new_zeros(NORMS), health.flatten()]))

    def _tensor_numbers(
        self, call: _Call, sample: Sample, weight: Tensor, grad: Tensor
    ) -> TensorNumbers | None:
        """All ranks of the tensor axis: what scales of all of X, W and G need, where a format asks.

        Ranks share the scale of an operand whose tokens are split over them, because the linear
        gathers it quantized. A shard of the features has a scale of its own. Both are so in
        Transformer Engine (`with_amax_reduction`) and in simulated linears.
        """
        if not self._needs_amax:
            return None

        def find() -> TensorNumbers:
            assert sample.input_amax is not None, "stored in the forward"
            amax = torch.stack([sample.input_amax, amax_of(weight), amax_of(grad)])
            turned = amax
            if self._rotation is not None:
                assert sample.rotated_amax is not None, "stored in the forward"
                turned_grad = rotated_amax(grad, self._rotation)
                turned = torch.stack([sample.rotated_amax, amax[1], turned_grad])
            delayed = None
            if call.delayed_scales is not None:
                assert sample.forward_scales is not None, "stored in the forward"
                delayed = torch.cat([sample.forward_scales, call.delayed_scales()[2:]])
            return TensorNumbers(amax, turned, delayed)

        found = self._try(call.placement, find)
        if found is None:
            zeros = weight.new_zeros(len(Operand), dtype=torch.float32)
            found = TensorNumbers(zeros, zeros)
        is_split = call.input_is_split, False, call.output_is_split
        if call.token_axis.group is not None and any(is_split):
            largest = torch.stack([found.amax, found.rotated_amax])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=call.token_axis.group)
            shared = to_device(largest.device, torch.tensor(is_split))
            amax, turned = (
                torch.where(shared, both, own)
                for both, own in zip(largest, (found.amax, found.rotated_amax), strict=True)
            )
            found = found._replace(amax=amax, rotated_amax=turned)
        return found


def _add_to(sums: dict[Any, Tensor], key: Any, row: Tensor) -> None:
    sums[key] = sums[key] + row if key in sums else row
