"""From observations on each rank to one table that all ranks hold.

1. Partial sums are added over each linear's tensor axis (one all-reduce an axis).
2. Per token, products are formed:   fisher         = 1/2 sum_t |eY_t|^2 |G_t|^2 T / N
                                     aligned_fisher = 1/2 sum_t <G_t, eY_t>^2 T
3. One all-reduce of a float64 table [1 + linears, columns] over all ranks; the first row carries
   the loss, the last columns what microbatches have in common (sketch.py).

G as seen in a pass over n microbatches is n times too small and, before the mean over data
ranks, `data.size` times too large for the batch-mean loss of those microbatches; the former is
already in G (Megatron divides each microbatch's loss by n), the latter is `grad_scale`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_snip.collectives import attempt, sum_over
from megatron_snip.statistics.coherence import coherent_square, sampling_variance
from megatron_snip.statistics.observation import Observation
from megatron_snip.statistics.pooling import joined_square, pooled_across, pooled_squares
from megatron_snip.statistics.records import (
    ACROSS,
    ACROSS_BY_FORMAT,
    BASE_COLUMNS,
    COUPLINGS,
    FORMAT_COLUMNS,
    SCALES,
    WHOLES,
    FormatStatistics,
    LinearStatistics,
    StatisticsTable,
)
from megatron_snip.statistics.sketch import WIDTH, across, own_squares
from megatron_snip.topology import Placement, TensorAxis, Topology

BASE_WIDTH = len(BASE_COLUMNS) + 2 * len(SCALES)
FORMAT_WIDTH = len(FORMAT_COLUMNS) + 2 * len(COUPLINGS)
"""Columns of a linear, then of each of its formats, in the reduced table; sketches follow."""


def row_width(num_formats: int) -> int:
    """Numbers of one linear in the reduced table, 8 bytes each."""
    sketches = len(ACROSS) + num_formats * len(ACROSS_BY_FORMAT)
    return BASE_WIDTH + num_formats * FORMAT_WIDTH + sketches * (WIDTH + 1)


@dataclass(frozen=True)
class LinearInfo:
    """What all ranks know of a linear without measuring; the table's row order follows a list.

    Attributes:
        name: layout-independent name.
        stage: pipeline stage.
        in_features: K, global.
        out_features: N, global.
        flops_per_token: FLOPs of its three GEMMs.
    """

    name: str
    stage: int
    in_features: int
    out_features: int
    flops_per_token: float

    @classmethod
    def of(cls, placement: Placement) -> LinearInfo:
        """The part of a placement that is the same on all ranks."""
        return cls(
            placement.name,
            placement.stage,
            placement.in_features,
            placement.out_features,
            placement.flops_per_token,
        )


@dataclass(frozen=True)
class ReduceInputs:
    """What one rank brings to the reduction.

    Attributes:
        step: training step (0-based).
        formats: the formats measured, in the observations' order.
        linears: every linear of the model, in the same order on all ranks.
        placements: this rank's linears, by instance.
        observations: what they showed, by instance.
        update_square: |update_k|^2 of this rank's trained linears, by instance.
        eps: the probe's step.
        grad_scale: factor that turns the observed G into the gradient of the batch-mean loss.
        num_microbatches: microbatches a data rank.
        loss_sum: sum of this rank's microbatch losses (0 where it holds no loss).
        loss_count: number of them.
        num_probes: over how many the observations are averaged.
    """

    step: int
    formats: tuple[str, ...]
    linears: tuple[LinearInfo, ...]
    placements: Mapping[str, Placement]
    observations: Mapping[str, list[Observation]]
    update_square: Mapping[str, float]
    eps: float
    grad_scale: float
    num_microbatches: int
    loss_sum: float
    loss_count: float
    num_probes: int = 1


def sum_over_tensor_axes(
    placements: Mapping[str, Placement],
    observations: Mapping[str, list[Observation]],
    control: ProcessGroup | None = None,
) -> None:
    """All ranks: add the observations' partial sums over each tensor axis, in place.

    Agreed on first: later, peers wait for each other within Megatron's own groups.

    Raises:
        RemoteFailure: on every rank of `control`, if there is no room for the sums on any.
    """
    packed = attempt("collecting sums", lambda: _packed(placements, observations), control)
    for axis, seen, flat in packed:
        sum_over(flat, axis.group)
        parts = [part for observation in seen for part in observation.parts()]
        pieces = iter(torch.split(flat, [part.numel() for part in parts]))
        for observation in seen:
            observation.replace_parts(
                [next(pieces).view(part.shape) for part in observation.parts()]
            )


def _packed(
    placements: Mapping[str, Placement], observations: Mapping[str, list[Observation]]
) -> list[tuple[TensorAxis, list[Observation], torch.Tensor]]:
    """Return the observations of each tensor axis that is shared, and their sums in one piece."""
    by_axis: dict[TensorAxis, list[Observation]] = defaultdict(list)
    for instance in sorted(observations):
        by_axis[placements[instance].tensor].extend(observations[instance])
    shared = {axis: seen for axis, seen in by_axis.items() if axis.group is not None and seen}
    return [
        (axis, seen, torch.cat([part.reshape(-1) for o in seen for part in o.parts()]))
        for axis, seen in shared.items()
    ]


def reduce_statistics(inputs: ReduceInputs, topology: Topology) -> StatisticsTable:
    """All ranks: return the table of the whole model, the same on every rank."""
    sum_over_tensor_axes(inputs.placements, inputs.observations, topology.control)
    table = _local_table(inputs, topology)
    sum_over(table, topology.control)
    return _decode(inputs, table)


def _local_table(inputs: ReduceInputs, topology: Topology) -> torch.Tensor:
    """Return this rank's contribution; every linear's tensor rank 0 speaks for its axis."""
    width = row_width(len(inputs.formats))
    table = torch.zeros((1 + len(inputs.linears), width), dtype=torch.float64)
    index = {linear.name: 1 + i for i, linear in enumerate(inputs.linears)}
    table[0, 0], table[0, 1] = inputs.loss_sum, inputs.loss_count
    batch_tokens = _batch_tokens(inputs, topology)
    for instance, seen in inputs.observations.items():
        placement = inputs.placements[instance]
        if placement.tensor.rank != 0:
            continue
        row = table[index[placement.name]]
        for observation in seen:
            row += _row(placement, observation, inputs, batch_tokens)
        if topology.data_axis(placement).rank == 0:
            row[BASE_COLUMNS.index("update_square")] += inputs.update_square.get(instance, 0.0)
    return table


def _batch_tokens(inputs: ReduceInputs, topology: Topology) -> int:
    """T, tokens of the measured microbatches over all data ranks; an expert sees only some."""
    dense = [
        observation.grad.numel()
        for instance, seen in inputs.observations.items()
        if inputs.placements[instance].expert is None
        for observation in seen
    ]
    return max(dense, default=0) * inputs.num_microbatches * topology.data.size


def _row(
    placement: Placement, seen: Observation, inputs: ReduceInputs, batch_tokens: int
) -> torch.Tensor:
    """Return one observation's contribution to its linear's row, [columns] FP64 on the CPU."""
    num_tokens = seen.grad.numel()
    scale, scale_square = inputs.grad_scale, inputs.grad_scale**2
    per_step = 1.0 / inputs.eps**2
    whole = per_step * num_tokens / max(seen.rows.numel(), 1)  # from the sample to all tokens
    base: dict[str, Any] = {
        "microbatches": 1.0,
        "tokens": float(num_tokens),
        "input_square": seen.norms[0],
        "weight_square": seen.norms[1],
        "output_square": seen.norms[2],
        "grad_square": seen.norms[3] * scale_square,
        "wgrad_square": seen.norms[4] * scale_square,
        "update_square": 0.0,
        "probe_tokens": float(seen.rows.numel()),
        "probe_input_square": seen.probe[0] * whole,
        "probe_input_noise": seen.probe[1] * whole,
        "probe_grad_square": seen.probe[2] * whole * scale_square,
        "probe_grad_noise": seen.probe[3] * whole * scale_square,
    }
    probed = per_step * scale_square
    values = [base[name] for name in BASE_COLUMNS] + list((seen.scalings * probed).flatten())
    update_square = inputs.update_square.get(placement.instance, 1.0)  # 1: frozen, error is 0
    for f in range(len(inputs.formats)):
        first = seen.first[f].sum() * scale
        fisher = (seen.output_error[f] * seen.grad).sum() * scale_square
        aligned = seen.first[f].square().sum() * scale_square
        couplings = seen.couplings[f] * probed
        by_name: dict[str, Any] = {
            "first": first,
            "first_abs": first.abs(),
            "first_square": first.square(),
            "fisher": 0.5 * fisher * batch_tokens / placement.out_features,
            "aligned_fisher": 0.5 * aligned * batch_tokens,
            "local_square": seen.errors[f, 4] * scale_square / update_square,
            "output_error_square": seen.output_error[f].sum(),
            "input_error_square": seen.errors[f, 0],
            "weight_error_square": seen.errors[f, 1],
            "grad_error_square": seen.errors[f, 2] * scale_square,
            "wgrad_error_square": seen.errors[f, 3] * scale_square,
            "output_shift": seen.errors[f, 5],
        }
        values += [by_name[name] for name in FORMAT_COLUMNS] + list(couplings.flatten())
    device = seen.grad.device
    columns = [torch.as_tensor(v, dtype=torch.float64, device=device) for v in values]
    # One copy to the CPU a row: each would wait for the device.
    return torch.cat([torch.stack(columns), _sketches(seen, inputs, update_square)]).cpu()


def _sketches(seen: Observation, inputs: ReduceInputs, update_square: float) -> torch.Tensor:
    """Return one microbatch's sketches and their squares, flat, in the units of the table."""
    factors = torch.full_like(seen.sketches[:, :1], inputs.grad_scale / inputs.eps)
    first = len(ACROSS) + ACROSS_BY_FORMAT.index("local_square")
    factors[first :: len(ACROSS_BY_FORMAT)] = inputs.grad_scale / update_square**0.5
    return own_squares(seen.sketches * factors).flatten()


def _decode(inputs: ReduceInputs, table: torch.Tensor) -> StatisticsTable:
    columns = BASE_WIDTH + len(inputs.formats) * FORMAT_WIDTH
    rows: Sequence[Sequence[float]] = table[:, :columns].tolist()
    linears = [
        _linear(info, row, inputs.formats)
        for info, row in zip(inputs.linears, rows[1:], strict=True)
    ]
    sketched = table[1:, columns:].reshape(len(linears), -1, WIDTH + 1)
    linears = _with_across(linears, inputs.formats, across(sketched).T.tolist())
    loss_sum, loss_count = rows[0][0], rows[0][1]
    loss = loss_sum / loss_count if loss_count else None
    return StatisticsTable(
        inputs.step, loss, inputs.eps, tuple(_with_forward(linears, inputs.num_probes))
    )


def _linear(info: LinearInfo, row: Sequence[float], formats: Sequence[str]) -> LinearStatistics:
    base = dict(zip(BASE_COLUMNS, row, strict=False))
    all_sampled = base["probe_tokens"] == base["tokens"]
    base |= _joined(SCALES, row[len(BASE_COLUMNS) : BASE_WIDTH], all_sampled)
    by_format = {}
    for f, name in enumerate(formats):
        columns = row[BASE_WIDTH + f * FORMAT_WIDTH :][:FORMAT_WIDTH]
        values = dict(zip(FORMAT_COLUMNS, columns, strict=False))
        parts = columns[len(FORMAT_COLUMNS) :]
        values |= _joined(COUPLINGS, parts, all_sampled)
        diagonal = parts[2 * COUPLINGS.index("forward_whole_square")]
        values["forward_whole_variance"] = sampling_variance(
            diagonal, base["microbatches"], base["tokens"], base["probe_tokens"]
        )
        by_format[name] = FormatStatistics(**values)
    return LinearStatistics(
        info.name,
        info.stage,
        info.in_features,
        info.out_features,
        info.flops_per_token,
        **base,
        formats=by_format,
    )


def _with_across(
    linears: Sequence[LinearStatistics], formats: Sequence[str], common: Sequence[Sequence[float]]
) -> list[LinearStatistics]:
    """Add what microbatches have in common (common[quantity][linear]) to what they give each."""
    names, given = [s.name for s in linears], iter(common)
    base = {field: _sums([getattr(s, field) for s in linears], next(given)) for field in ACROSS}
    by_format: dict[str, dict[str, list[float]]] = {}
    for name in formats:
        by_format[name] = {}
        for field in ACROSS_BY_FORMAT:
            apart = [getattr(s.formats[name], field) for s in linears]
            shared = next(given)
            if field not in WHOLES:  # whose sketch is exact
                shared = pooled_across(names, shared, apart, [s.microbatches for s in linears])
            by_format[name][field] = _sums(apart, shared)
    found = []
    for i, s in enumerate(linears):
        whole: dict[str, Any] = {field: sums[i] for field, sums in base.items()}
        whole["formats"] = {
            name: replace(f, **{field: sums[i] for field, sums in by_format[name].items()})
            for name, f in s.formats.items()
        }
        found.append(replace(s, **whole))
    return found


def _sums(apart: Sequence[float], common: Sequence[float]) -> list[float]:
    """A square is >= 0; NaN stays."""
    return [0.0 if a + c < 0 else a + c for a, c in zip(apart, common, strict=True)]


def _joined(names: Sequence[str], parts: Sequence[float], all_sampled: bool) -> dict[str, float]:
    return {
        name: coherent_square(diagonal, rest, all_sampled or name in WHOLES)
        for name, diagonal, rest in zip(names, parts[::2], parts[1::2], strict=True)
    }


def _with_forward(linears: Sequence[LinearStatistics], probes: int) -> list[LinearStatistics]:
    """Fill in fwd^2 and its part through the output's scale: c^2 scale^2, pooled over a kind."""
    pooled = pooled_squares(
        [s.name for s in linears],
        [s.scale_square for s in linears],
        [s.scale_channel_square for s in linears],
        probes,
    )
    return [
        replace(s, formats={name: _forward(s, f, square, probes) for name, f in s.formats.items()})
        for s, square in zip(linears, pooled, strict=True)
    ]


def _forward(
    s: LinearStatistics, f: FormatStatistics, square: float, probes: int
) -> FormatStatistics:
    part = f.output_shift / s.output_square if s.output_square != 0 else 0.0  # c; NaN stays
    scale = part**2 * square
    estimate = f.forward_channel_square + scale
    forward = joined_square(f.forward_whole_square, f.forward_whole_variance, estimate, probes)
    return replace(f, forward_scale_square=scale, forward_square=forward)
