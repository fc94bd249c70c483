"""StepObserver: watches the linears of one training iteration and adds up what `measure.py` finds.

The forward stores a sample of the input's tokens. A tap on the linear's output measures in the
backward, when the gradient of the output is there. The tap is an identity in both directions.
Training itself does not change: nothing is perturbed, and only fused MLPs need an additional run
(run/observation.py).

On Megatron's own linears the tap comes before the reduction over tensor-parallel ranks, whose
backward gives every rank the full gradient. On Transformer Engine's linears it comes after the
reduction. There the gradient is full too, except under sequence parallelism: then a rank has the
gradient of its own tokens (`output_is_split`), and the ranks exchange the sampled rows.

Ranks of a tensor axis exchange their sums within the backward, all in the same order. A rank that
fails to measure contributes zeros, and `table` raises on all ranks. Nothing waits for the device
before `table`, except in MoE layers that are measured: there ranks exchange how many tokens each
expert gets (linears/moe_dispatch.py).

An expert's rows come from several data ranks, its senders. The rows of each sender are a microbatch
of their own, sampled as if the expert were on the sender's rank, without expert parallelism. Only
the scale of an entire tensor is that of the rows of all senders, as in the expert's GEMM. Any other
linear has one sender, this rank.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.collectives import sum_over
from megatron_snip.formats import Format, ScaleType
from megatron_snip.quantizers.reference import amax_of
from megatron_snip.quantizers.stochastic import (
    ColumnMap,
    StochasticStream,
    grad_output_stream,
)
from megatron_snip.statistics import fused, measure
from megatron_snip.statistics.health_table import HealthTable
from megatron_snip.statistics.measure import OperandSums
from megatron_snip.statistics.measure_added import added_names, measure_added
from megatron_snip.statistics.operands import AmaxesOrScales, Operands
from megatron_snip.statistics.rank_sums import RankSums
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.statistics.reduce import reduce_sums
from megatron_snip.statistics.sample import (
    MeasureSettings,
    Sample,
    SampledRows,
    WeightRows,
    draw_sample,
    draw_weight_rows,
    is_measured,
    rows_of,
    to_device,
)
from megatron_snip.topology import Axis, LinearInfo, Placement, Topology
from megatron_snip.types import Operand

T = TypeVar("T")

DelayedScales = Callable[[Format], Tensor]
"""Returns the scales [3] of X, W and G in a format with delayed scaling, FP32."""

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
        num_earlier: the number of its forwards in this iteration before this one.
        num_tokens: the number of tokens, over all ranks of the tensor axis.
        weight: returns W [N, K] of this shard; it is called while the linear is measured.
        num_inputs: the number K of input features.
        token_axis: the ranks over which the tokens are split, if `input_is_split` or
            `output_is_split`.
        input_is_split: as in `StepObserver.observe`.
        output_is_split: as in `StepObserver.observe`.
        prepare_input: as in `StepObserver.observe`.
    """

    placement: Placement
    num_earlier: int
    num_tokens: int
    weight: Callable[[], Tensor]
    num_inputs: int
    token_axis: Axis
    input_is_split: bool
    output_is_split: bool
    prepare_input: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class _Kept:
    """What the forward keeps of a linear's input for the backward.

    Attributes:
        samples: the sampled tokens of each sender.
        amax: FP32, the largest magnitude over all tokens of this shard. None if no format has a
            scale of an entire tensor, or if measuring has failed.
    """

    samples: list[Sample]
    amax: Tensor | None


def operand_sums(
    operands: Operands, formats: Mapping[str, Format], stream: StochasticStream
) -> OperandSums:
    """Measure one linear, by kernels or by PyTorch; `measure.operand_sums` has the contract."""
    if fused.is_fused(operands, formats):
        return fused.operand_sums(operands, formats, stream)
    return measure.operand_sums(operands, formats, stream)


class StepObserver:
    """Observes one iteration; the linears call `observe` on every rank.

    Attributes:
        seconds: what measuring has cost so far, in seconds: this rank's host time in the forward
            samples, in the taps and in `table`. Where an additional, unfused run is observed, its
            wall time takes the place of the first two (`Observations.observe_unfused`).
    """

    def __init__(
        self,
        settings: MeasureSettings,
        topology: Topology,
        rows_by_sender: Callable[[Placement, int], RowsBySender | None] = lambda *_: None,
    ) -> None:
        """Start with nothing observed.

        Args:
            settings: what to observe.
            topology: this rank's place.
            rows_by_sender: given an expert and the number of rows of its input, returns them by the
                data rank that sent them; None if all rows are of this rank's own microbatch.
        """
        self.seconds = 0.0
        self._settings = settings
        self._topology = topology
        self._rows_by_sender = rows_by_sender
        # A scale of an entire tensor needs the tensor's amax; under delayed scaling the scale is
        # given.
        self._needs_amaxes_or_scales = any(
            fmt.needs_amax_or_scale for fmt in settings.formats.values()
        )
        self._num_forwards: dict[Placement, int] = defaultdict(int)
        self._measured_weights: set[Placement] = set()
        self._sums = RankSums(settings, topology)
        self._is_measured = partial(is_measured, settings, topology)
        # All linears of a microbatch have the same sample, so it is drawn once; so are the rows of
        # weights of one shape.
        self._draw = cache(partial(draw_sample, settings))
        self._weight_rows = cache(self._weight_rows_on)

    @property
    def failure(self) -> str | None:
        """Why measuring failed on this rank; None if it did not."""
        return self._sums.failure

    def restart(self) -> None:
        """Forget what was observed.

        Megatron repeats a pass within one call of its function if an expert's buffer was too small;
        only the last pass counts.
        """
        self._num_forwards.clear()
        self._measured_weights.clear()
        self._sums.clear()

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
        delayed_scales: DelayedScales | None = None,
    ) -> Tensor:
        """Return `output`, possibly with a tap on it.

        Args:
            placement: which linear this is.
            input: [tokens, K] or [s, b, K], as given to the linear.
            weight: [N, K], this rank's shard. For a weight that is stored in another form: a
                function that returns it, called in the backward; one such weight is held at a time.
            output: what the linear's GEMM gave.
            input_is_split: the rows are this rank's share of the tokens, which the linear gathers
                over its tensor axis (sequence parallelism).
            output_is_split: the output's rows are this rank's share of the tokens, which a
                reduction over the tensor axis scattered (sequence parallelism).
            prepare_input: returns what the GEMM multiplies for rows of `input` (a fused norm).
            delayed_scales: returns the current scales of a linear under delayed scaling. It is
                called in the forward, for X and W, and in the backward, for G. All ranks call it,
                and may communicate in it.
        """
        if not (torch.is_grad_enabled() and output.requires_grad):
            return output  # an evaluation, or a forward that is recomputed later
        # One shard, but a split input: the weight is replicated (a down-projection of latent
        # attention), and sequence parallelism splits the tokens over the model's tensor axis.
        # (Without tensor parallelism both axes have size 1.)
        is_replicated = input_is_split and placement.tp.size == 1
        token_axis = self._topology.tp if is_replicated else placement.tp
        num_rows = input.shape[:-1].numel()
        call = _Call(
            placement=placement,
            num_earlier=self._num_forwards[placement],
            num_tokens=num_rows * (token_axis.size if input_is_split else 1),
            weight=weight if callable(weight) else weight.detach,
            num_inputs=input.shape[-1],
            token_axis=token_axis,
            input_is_split=input_is_split,
            output_is_split=output_is_split,
            prepare_input=prepare_input,
        )
        if self.only_counts(placement):
            return self.counted([placement], [call.num_tokens], output)
        self._num_forwards[placement] += 1
        with self._measuring():
            forward_scales = self._delayed(delayed_scales)
            samples = self._draw_samples(call)
            fill = partial(self._fill, call, samples, input.detach())
            kept = _Kept(samples, self._try(placement, fill) if samples else None)

        def on_backward(grad: Tensor) -> None:
            with self._measuring():
                self._sums.count(placement, call.num_tokens)
                flat = grad.detach().reshape(-1, grad.shape[-1])
                delayed = self._delayed(delayed_scales)
                # X and W were multiplied with the scales of the forward, G with those of now.
                for fmt, scales in forward_scales.items():
                    delayed[fmt] = torch.cat([scales[:2], delayed[fmt][2:]])
                self._measure(call, kept, flat, delayed)

        return tap(output, on_backward)

    def only_counts(self, placement: Placement) -> bool:
        """Return whether no data rank measures the next forward of a linear."""
        names = self._settings.names
        if names is not None and placement.name not in names:
            return True
        # If a rank measures its microbatch, so does rank 0.
        num_ranks = self._topology.data_axis(placement).size
        nth = self._num_forwards[placement] // placement.num_calls
        return not self._is_measured(nth * num_ranks, num_ranks)

    def counted(
        self, placements: Sequence[Placement], num_tokens: Sequence[int], output: Tensor
    ) -> Tensor:
        """Return `output`, with a tap that counts the backward of a forward and measures nothing.

        Args:
            placements: the linears whose GEMMs gave the output; several for grouped experts.
            num_tokens: the number of tokens of each.
            output: what the GEMMs gave.
        """
        if not (torch.is_grad_enabled() and output.requires_grad):
            return output
        for placement in placements:
            self._num_forwards[placement] += 1

        def on_backward(_: Tensor) -> None:
            with self._measuring():
                for placement, count in zip(placements, num_tokens, strict=True):
                    self._sums.count(placement, count)

        return tap(output, on_backward)

    def table(
        self,
        linears: Sequence[LinearInfo],
        grad_scale: float,
        loss: float | None,
        norms: Callable[[], Mapping[str, Tensor]] = dict,
        also_summed: Tensor | None = None,
    ) -> tuple[StatisticsTable, HealthTable]:
        """All ranks: add up over ranks; see `reduce_sums` for arguments and errors."""
        control = self._topology.control
        with self._measuring():
            self._sums.finish()
            return reduce_sums(
                self._sums,
                self._settings,
                linears,
                grad_scale,
                loss,
                norms,
                control,
                also_summed,
            )

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Count the seconds of the block, in which autograd records nothing."""
        begin = time.perf_counter()
        try:
            # `--cpu` inspects every call of torch, to redirect those that name CUDA. No call here
            # does, so the inspection is skipped.
            with torch._C.DisableTorchFunction(), torch.no_grad():
                yield
        finally:
            self.seconds += time.perf_counter() - begin

    def _draw_samples(self, call: _Call) -> list[Sample]:
        """Return the sampled tokens of a linear's input by sender, without X.

        In MoE layers the ranks that exchange tokens call it together, and wait for the device.
        """
        placement = call.placement
        num_ranks = self._topology.data.size
        rows_by_sender: Mapping[int, Tensor | None] | None
        rows_by_sender = self._rows_by_sender(placement, call.num_tokens)
        if rows_by_sender is None:
            own = self._topology.data_axis(placement)
            num_ranks = own.size
            rows_by_sender = {own.rank: None}  # all rows
        samples = []
        # This is the nth microbatch of each rank; a repeated layer is called again in it.
        nth, repetition = divmod(call.num_earlier, placement.num_calls)
        for rank, rows in rows_by_sender.items():
            microbatch = nth * num_ranks + rank
            if not self._is_measured(microbatch, num_ranks):
                continue
            num_tokens = call.num_tokens if rows is None else len(rows)
            drawn = self._draw(num_tokens, microbatch * placement.num_calls + repetition)
            of_sender = drawn.rows if rows is None else SampledRows(rows[drawn.rows.indices])
            # A copy: linears share the draw, and each stores its own X in it.
            samples.append(replace(drawn, rows=of_sender))
        return samples

    def _fill(self, call: _Call, samples: list[Sample], input: Tensor) -> Tensor | None:
        """Put the sampled rows of X into the samples; return `_Kept.amax`."""
        x = input.reshape(-1, input.shape[-1])
        prepare = call.prepare_input
        amax = None
        if self._needs_amaxes_or_scales:
            # The amax is of all tokens, so all are prepared, and not the sampled rows alone.
            if prepare is not None:
                x = prepare(x)
                prepare = None
            amax = amax_of(x)
        for sample in samples:
            own = rows_of(x, sample.rows, call.input_is_split, call.token_axis)
            sample.input = own if prepare is None else replace(own, values=prepare(own.values))
        return amax

    def _delayed(self, scales: DelayedScales | None) -> dict[Format, Tensor]:
        """Return the scales [3] of X, W and G in each format with delayed scaling."""
        if scales is None:
            return {}
        formats = self._settings.formats.values()
        return {fmt: scales(fmt) for fmt in formats if fmt.scale is ScaleType.DELAYED}

    def _measure(
        self, call: _Call, kept: _Kept, grad: Tensor, delayed: dict[Format, Tensor]
    ) -> None:
        """All ranks of the tensor axis: measure one linear on the microbatch of each sender.

        Args:
            call: the forward.
            kept: what the forward kept.
            grad: G [tokens, N] of all tokens, or under `output_is_split` of this rank's tokens.
            delayed: the linear's scales [3] of X, W and G if it runs delayed scaling.
        """
        if not kept.samples:  # other data ranks measure their microbatches, this one does not
            return
        placement = call.placement
        # W does not change within an iteration, so it is measured in one sample of one microbatch.
        measures_weight = placement not in self._measured_weights
        self._measured_weights.add(placement)
        weight = None
        if measures_weight or self._settings.added:  # plugins measure all of W, each time
            weight = self._try(placement, call.weight)
        known = self._amaxes_or_scales(call, kept, weight, grad, delayed)
        for sample in kept.samples:
            self._measure_sample(call, sample, weight, known, grad, measures_weight)
            measures_weight = False

    # Autograd sees nothing of what is computed here. Operations then start faster than without
    # gradients alone.
    @torch.inference_mode()
    def _measure_sample(
        self,
        call: _Call,
        sample: Sample,
        weight: Tensor | None,
        known: AmaxesOrScales | None,
        grad: Tensor,
        measures_weight: bool,
    ) -> None:
        """All ranks of the tensor axis: measure one linear on the microbatch of one sender."""
        placement = call.placement
        settings = self._settings
        x, g = self._sampled_rows(call, sample, grad)
        stream = grad_output_stream(settings.seed, placement, settings.iteration, sample.index)
        rows = self._weight_rows(stream.columns, placement.out_features, grad.device)

        def measured() -> OperandSums:
            operands = Operands(x, None, g, known)
            if not measures_weight:
                return operand_sums(operands, settings.formats, stream)
            assert weight is not None
            sampled = weight if rows.own is None else weight.index_select(0, rows.own)
            norm = torch.linalg.vector_norm(weight, dtype=torch.float32)
            self._sums.add_weight_norm(placement, norm)
            return operand_sums(operands._replace(weight=sampled), settings.formats, stream)

        sums = self._try(placement, measured)
        if sums is None:  # the refresh fails; other shards wait in the sum
            sums = OperandSums.zeros(len(settings.formats), grad.device)
        sums = sums.summed(placement.tp.group)
        num_weight_rows = rows.num_rows if measures_weight else 0
        add = partial(self._sums.add, placement, sample, sums, num_weight_rows)
        self._try(placement, add)
        if settings.added:
            assert weight is not None
            self._measure_added(placement, sample, Operands(x, weight, g, known), stream)

    def _weight_rows_on(
        self, columns: ColumnMap | None, num_rows: int, device: torch.device
    ) -> WeightRows:
        """Return the rows of W that are measured, on `device`.

        Args:
            columns: `StochasticStream.columns` of grad_output; None if this rank has all of W's
                rows.
            num_rows: number of rows of the unsharded W.
            device: where they are wanted.
        """
        columns = columns or ColumnMap(num_rows, num_rows, num_rows, 0)
        found = draw_weight_rows(self._settings, columns)
        return found if found.own is None else found._replace(own=to_device(device, found.own))

    def _measure_added(
        self, placement: Placement, sample: Sample, operands: Operands, stream: StochasticStream
    ) -> None:
        """All ranks of the tensor axis: measure the statistics of plugins."""
        settings = self._settings
        measure = partial(
            measure_added,
            operands,
            settings=settings,
            stream=stream,
            failures=self._sums.failed_statistics,
        )
        found = self._try(placement, measure)
        if found is None:  # the refresh fails; other shards wait in the sum
            sizes = [len(added_names(settings, combine)) for combine in ("sum", "max")]
            zeros = partial(operands.input.new_zeros, dtype=torch.float32)
            found = (zeros(sizes[0]), zeros(sizes[1]))
        sums, maxima = found
        if placement.tp.group is not None:
            sums = sum_over(sums, placement.tp.group)
        add = partial(self._sums.add_added, placement, sample, sums, maxima)
        self._try(placement, add)

    def _sampled_rows(self, call: _Call, sample: Sample, grad: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks of the tensor axis: return X and G of the sampled tokens.

        A rank that fails takes part in what its peers exchange, with zeros.
        """
        own = sample.input
        x = None if own is None else self._try(call.placement, own.with_zeros)
        g = self._try(call.placement, partial(self._sampled_grad, call, sample, grad))
        if x is None:
            x = grad.new_zeros((len(sample.rows), call.num_inputs))
        if g is None:
            g = grad.new_zeros((len(sample.rows), grad.shape[1]))
        if call.input_is_split:
            x = sum_over(x, call.token_axis.group)
        if call.output_is_split:
            g = sum_over(g, call.token_axis.group)
        return x, g

    @staticmethod
    def _sampled_grad(call: _Call, sample: Sample, grad: Tensor) -> Tensor:
        """Return G of the sampled tokens; zeros for those of other ranks."""
        return rows_of(grad, sample.rows, call.output_is_split, call.token_axis).with_zeros()

    def _try(self, placement: Placement, action: Callable[[], T]) -> T | None:
        """Return the result of `action`; None if measuring has failed: training must go on."""
        if self.failure is None:
            try:
                return action()
            except Exception as error:
                self._sums.record_failure(error, f"{placement.name}: ")
        return None

    def _amaxes_or_scales(
        self,
        call: _Call,
        kept: _Kept,
        weight: Tensor | None,
        grad: Tensor,
        delayed: dict[Format, Tensor],
    ) -> AmaxesOrScales | None:
        """All ranks of the tensor axis: return amaxes of X, W and G, or their delayed scales.

        None if no format has a scale of an entire tensor.

        Ranks share the scale of an operand whose tokens are split over them, because the GEMM
        multiplies the gathered tensor under one scale. A shard of the features has a scale of its
        own. Both are so in Transformer Engine (`with_amax_reduction`) and in simulated linears.
        """
        if not self._needs_amaxes_or_scales:
            return None

        def find() -> AmaxesOrScales:
            assert kept.amax is not None, "stored in the forward"
            nothing = torch.zeros_like(kept.amax)
            of_weight = nothing if weight is None else amax_of(weight)
            return AmaxesOrScales(torch.stack([kept.amax, of_weight, amax_of(grad)]), delayed)

        found = self._try(call.placement, find)
        if found is None:
            found = AmaxesOrScales(grad.new_zeros(len(Operand), dtype=torch.float32), {})
        is_split = (call.input_is_split, False, call.output_is_split)  # X, W and G
        if call.token_axis.group is None or not any(is_split):
            return found
        shared = found.amax.clone()
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=call.token_axis.group)
        takes_shared = to_device(shared.device, torch.tensor(is_split))
        return found._replace(amax=torch.where(takes_shared, shared, found.amax))
