"""Low-precision health: what quantization does to each tensor of a linear; docs/glossary.md.

Of each operand and format an observed iteration adds up, over the sampled tokens,

    |Q(x) - x|^2,  elements that become zero,  elements that saturate,  tiles by log2 of their scale

`input` and `weight` as fprop quantizes them, `grad_output` as dgrad does. Of each operand alone it
counts elements by log2 of their magnitude. Sums are scaled to all tokens and add over shards,
microbatches and ranks; amax is a maximum. Experts have rows of their own beside their linear's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, compress
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_snip.config import HealthMeasure
from megatron_snip.formats import Format, ScaleType, lowest_precision
from megatron_snip.quantizers.reference import Block, tile_amax, tile_scales
from megatron_snip.statistics.optimizer_state import adam_shards, is_sharded, learning_rate
from megatron_snip.statistics.records import LinearStatistics, StatisticsTable, read_table
from megatron_snip.statistics.sensitivity import PlannedWeight, Sensitivity
from megatron_snip.topology import Topology
from megatron_snip.types import Gemm, Operand

SCHEMA_VERSION = 1

LOWEST_LOG2, NUM_BINS = -96, 128
"""Scales are counted by floor(log2(scale)), from 2^-96 to 2^31; others count at the ends."""

OPERAND_SUMS = 3 + NUM_BINS
"""Numbers of one operand in one format: error square, underflowed, saturated, then the bins. After
the last format the same numbers of the operand itself: three zeros, then elements by magnitude."""

NORMS = 3
"""Numbers of one linear: |gradient|^2, |W|^2 and |learning rate * update|^2."""

FINDING_COLUMNS = ("measure", "linear", "tensor", "format", "value")
"""Of a table of the worst linears, as `HealthTable.worst` has them."""

NUM_WORST = 10
"""Rows of a table of the worst linears."""

EXPERT_COLUMNS = ("microbatches", "tokens", "input_square", "weight_square", "grad_square")
"""Columns of an expert's row; the first three numbers of each format and operand follow them."""

HISTOGRAM_STRIDE = 8
"""A histogram counts every eighth feature of the sampled tokens, and of W every eighth row too."""

_ULPS = 1 + 2.0**-20  # a scale's own rounding is no saturation


class Sample(NamedTuple):
    """What an observer adds up beside the statistics.

    Attributes:
        sums: [formats + 1, 3 operands, OPERAND_SUMS], FP32; adds over shards.
        amax: [3], FP32, the largest magnitudes of this shard's X, W and G.
    """

    sums: Tensor
    amax: Tensor


def tile_counts(
    x: Tensor, quantized: Tensor, fmt: Format, block: Block, tensor_amax: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return counts [2 + NUM_BINS] and amax [], FP32, of a matrix and what is left of it.

    The counts are of elements that become zero, of elements beyond the largest value of their
    tile, and of tiles by their scale; tiles of zeros and tiles with NaN or Inf have none.

    Args:
        x: [rows, cols].
        quantized: Q(x), dequantized.
        fmt: the format of Q.
        block: (rows, cols) of its tiles.
        tensor_amax: for E4M3 scales.
    """
    assert fmt.element is not None
    (rows, cols), (tall, wide) = x.shape, block
    magnitude, missing = x.abs(), (0, -cols % wide, 0, -rows % tall)
    if any(missing):
        magnitude = torch.nn.functional.pad(magnitude, missing)
    tiles = magnitude.view(-(-rows // tall), tall, -(-cols // wide), wide)
    amax = tile_amax(tiles).float().contiguous()
    scale = tile_scales(amax, fmt, tensor_amax)[1]
    saturated = amax.new_zeros(())
    if fmt.scale is ScaleType.E4M3:  # other scales are rounded up, or not at all
        saturated = (tiles > scale * (fmt.element.max_value * _ULPS)).sum().float()
    bins = _log2_counts(scale, (amax > 0) & scale.isfinite())
    zeros = quantized.eq(0).logical_and_(x).sum().float()
    largest = amax.max() if amax.numel() else amax.new_zeros(())
    largest.nan_to_num_(nan=math.inf, posinf=math.inf)
    return torch.cat([zeros[None], saturated[None], bins]), largest


def magnitudes(x: Tensor, operand: Operand) -> Tensor:
    """Return counts [OPERAND_SUMS], FP32, of a matrix's elements by floor(log2(|x|))."""
    rows = HISTOGRAM_STRIDE if operand is Operand.WEIGHT else 1
    part = x[::rows, ::HISTOGRAM_STRIDE].float().abs()
    counts = _log2_counts(part, (part > 0) & part.isfinite())
    return torch.cat([counts.new_zeros(OPERAND_SUMS - NUM_BINS), counts])


def _log2_counts(values: Tensor, counted: Tensor) -> Tensor:
    index = (torch.frexp(values).exponent.long() - 1 - LOWEST_LOG2).clamp_(0, NUM_BINS - 1)
    bins = values.new_zeros(NUM_BINS, dtype=torch.float32)
    return bins.index_add_(0, index.flatten(), counted.float().flatten())


@torch.no_grad()
def weight_norms(
    weights: Mapping[str, PlannedWeight],
    optimizer: Any,
    sensitivities: Mapping[str, Sensitivity],
    topology: Topology,
    loss_scale: float,
) -> dict[str, Tensor]:
    """Return this rank's part of each linear's norms, FP64 [NORMS]; parts add over ranks.

    Args:
        weights: this rank's, by instance; their gradients are reduced over data ranks.
        optimizer: Megatron's; what it owns of a weight is counted.
        sensitivities: by instance; they hold the size of the update.
        topology: this rank's place.
        loss_scale: of the gradients.
    """
    shards = adam_shards(optimizer)
    sharded, rate = is_sharded(optimizer), learning_rate(optimizer) or 0.0
    found: dict[str, Tensor] = {}
    for instance, (placement, weight) in ((i, (p.placement, p.weight)) for i, p in weights.items()):
        rank, shard = topology.data_axis(placement).rank, shards.get(weight)
        if placement.tensor.size == 1 and placement.tensor.rank:  # a replicated weight
            continue
        grad = getattr(weight, "main_grad", None)
        grad = weight.grad if grad is None else grad
        norms = weight.data.new_zeros(NORMS, dtype=torch.float64)
        if grad is not None and (shard is not None if sharded else rank == 0):
            owned = slice(shard.start, shard.end) if sharded and shard is not None else slice(None)
            norms[0] = _square(grad.reshape(-1)[owned]) / loss_scale**2
            norms[1] = _square(weight.detach().reshape(-1)[owned])
        if instance in sensitivities and rank == placement.tensor.rank == 0:
            norms[2] = rate**2 * sensitivities[instance].update_square
        name = placement.name
        found[name] = found[name] + norms if name in found else norms
    return found


@dataclass(frozen=True)
class OperandHealth:
    """One operand in one format; None where nothing was observed, or where the value is infinite.

    Attributes:
        sqnr_db: 10 log10(|x|^2 / |Q(x) - x|^2).
        underflow: share of the elements that are not zero and become zero.
        saturated: share of the elements that are larger than what their tile can hold.
        scale_log2: least, median and largest log2 of a tile's scale, rounded down.
        worst_expert: (expert, value) by measure, of the expert of a layer with the worst value.
    """

    sqnr_db: float | None
    underflow: float | None
    saturated: float | None
    scale_log2: tuple[float, float, float] | None
    worst_expert: dict[HealthMeasure, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class LinearHealth:
    """One linear; experts of a layer together. None: not observed, or infinite.

    Attributes:
        name: layout-independent name.
        stage: pipeline stage.
        gradient_norm: |dL/dW| of the batch, before clipping.
        update_ratio: |learning rate * update| / |W|, without weight decay.
        amax: by operand, over the sampled tokens.
        operands: by format and operand.
        gemm_sqnr_db: by format and GEMM: 10 log10(|Y|^2 / |eY|^2), also for dX and dW.
        histograms: by operand: k and the shares of elements with floor(log2(|x|)) = k, k + 1, ...
    """

    name: str
    stage: int
    gradient_norm: float | None
    update_ratio: float | None
    amax: dict[Operand, float | None]
    operands: dict[str, dict[Operand, OperandHealth]]
    gemm_sqnr_db: dict[str, dict[Gemm, float | None]]
    histograms: dict[Operand, tuple[float, list[float]]] = field(default_factory=dict)


class Finding(NamedTuple):
    """One value of a measure; `tensor` is an operand, a GEMM or empty, as is `format`."""

    value: float
    linear: str
    tensor: str
    format: str

    def __str__(self) -> str:
        """Return `decoder.layers.3.mlp.linear_fc2 input fp4 0.31`."""
        return " ".join(filter(None, (*self[1:], f"{self.value:.4g}")))


@dataclass(frozen=True)
class HealthTable:
    """health/<iteration>.json: the observed linears in model order, the same on every rank."""

    iteration: int
    linears: tuple[LinearHealth, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain built-in types, with the schema's version."""
        return {"version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: Any, source: str = "health file") -> HealthTable:
        """Build from what `to_dict` returned.

        Raises:
            UsageError: one line that names `source`, for another version and for bad entries.
        """
        return read_table(cls, value, SCHEMA_VERSION, source)

    @property
    def lowest(self) -> str | None:
        """The format with the fewest bits; None if no linear was observed."""
        names = tuple(dict.fromkeys(name for linear in self.linears for name in linear.operands))
        return lowest_precision(names).name if names else None

    def summary(self) -> dict[str, float]:
        """Return {`underflow/input/worst`: value, ...}, twelve numbers of the lowest format."""
        found = {}
        measures: tuple[HealthMeasure, ...] = ("sqnr_db", "underflow")
        for measure in measures:
            findings = self.findings(measure, self.lowest)
            for operand in Operand:
                values = [each.value for each in findings if each.tensor == operand]
                if values:
                    found[f"{measure}/{operand}/worst"] = values[0]
                    found[f"{measure}/{operand}/median"] = median(values)
        return found

    def worst(self, most: int | None = NUM_WORST) -> list[tuple[str, str, str, str, float]]:
        """Return (measure, linear, tensor, format, value): `most` of each measure, no zeros.

        `most` None returns all, with zeros.
        """
        return [
            (measure, each.linear, each.tensor, each.format, each.value)
            for measure in MEASURES
            for each in self.findings(measure)[:most]
            if each.value or most is None
        ]

    def beyond(self, measure: HealthMeasure, sign: float, limit: float) -> list[Finding]:
        """Return each linear's worst value above `limit` (`sign` 1) or below it (-1)."""
        found: dict[str, Finding] = {}
        for each in self.findings(measure):
            if sign * (each.value - limit) > 0:
                found.setdefault(each.linear, each)
        return list(found.values())

    def findings(self, measure: HealthMeasure, fmt: str | None = None) -> list[Finding]:
        """Return a measure's known values, worst first; `fmt` leaves out other formats'."""
        read, sign = MEASURES[measure]
        found = [
            Finding(value, linear.name, tensor, name)
            for linear in self.linears
            for value, tensor, name in read(linear)
            if value is not None and fmt in (None, name)
        ]
        return sorted(found, key=lambda each: sign * each.value)


def _of_operands(
    value: Callable[[OperandHealth], float | None], measure: HealthMeasure | None = None
) -> Any:
    def read(linear: LinearHealth) -> Iterator[tuple[float | None, str, str]]:
        for name, operands in linear.operands.items():
            for operand, health in operands.items():
                yield value(health), str(operand), name
                if measure in health.worst_expert:
                    expert, worst = health.worst_expert[measure]
                    yield worst, f"{operand} of expert {expert}", name

    return read


MEASURES: dict[HealthMeasure, tuple[Callable[[LinearHealth], Any], int]] = {
    "sqnr_db": (_of_operands(lambda h: h.sqnr_db, "sqnr_db"), 1),
    "underflow": (_of_operands(lambda h: h.underflow, "underflow"), -1),
    "saturated": (_of_operands(lambda h: h.saturated), -1),
    "scale_spread": (
        _of_operands(lambda h: h.scale_log2 and h.scale_log2[2] - h.scale_log2[0]),
        -1,
    ),
    "gemm_sqnr_db": (
        lambda h: ((v, str(g), f) for f, gemms in h.gemm_sqnr_db.items() for g, v in gemms.items()),
        1,
    ),
    "amax": (lambda h: ((v, str(operand), "") for operand, v in h.amax.items()), -1),
    "gradient_norm": (lambda h: [(h.gradient_norm, "", "")], -1),
    "update_ratio": (lambda h: [(h.update_ratio, "", "")], -1),
}
"""How each measure is read, and 1 where a small value is bad, -1 where a large one is."""


def _linear_health(
    s: LinearStatistics, sums: list[float], amax: list[float], experts: Tensor, grad_scale: float
) -> LinearHealth:
    grad, weight, update = sums[:NORMS]
    sizes = s.tokens * s.in_features, s.in_features * s.out_features, s.tokens * s.out_features
    squares = s.input_square, s.weight_square, s.grad_square
    observed = s.microbatches > 0
    operands: dict[str, dict[Operand, OperandHealth]] = {name: {} for name in s.formats}
    histograms: dict[Operand, tuple[float, list[float]]] = {}
    worst = _worst_experts(experts, s)
    for f, name in enumerate((*s.formats, None)):
        for o, operand in enumerate(Operand):
            first = NORMS + (len(Operand) * f + o) * OPERAND_SUMS
            count = s.microbatches or 1.0 if operand is Operand.WEIGHT else 1.0
            unit = grad_scale if operand is Operand.GRAD_OUTPUT else 1.0
            bins = sums[first + 3 : first + OPERAND_SUMS]
            error, zeros, saturated = (v / count for v in sums[first : first + 3])
            if name is None:
                if (histogram := _trimmed(bins, math.log2(unit))) is not None:
                    histograms[operand] = histogram
                continue
            operands[name][operand] = OperandHealth(
                _db(squares[o], error * unit**2),
                zeros / sizes[o] if observed and sizes[o] else None,
                saturated / sizes[o] if observed and sizes[o] else None,
                _spread(bins, math.log2(unit)),
                {m: (e[f][o], v[f][o]) for m, (e, v) in worst.items() if math.isfinite(v[f][o])},
            )
    units = 1.0, 1.0, grad_scale
    known = [
        a * u if observed and math.isfinite(a) else None for a, u in zip(amax, units, strict=True)
    ]
    return LinearHealth(
        s.name,
        s.stage,
        math.sqrt(grad) if grad > 0 and math.isfinite(grad) else None,
        math.sqrt(update / weight) if update > 0 and 0 < weight < math.inf else None,
        dict(zip(Operand, known, strict=True)),
        operands,
        {
            name: {
                Gemm.FPROP: _db(s.output_square, f.output_error_square),
                Gemm.DGRAD: _db(s.input_grad_square, f.input_grad_error_square),
                Gemm.WGRAD: _db(s.wgrad_square, f.wgrad_error_square),
            }
            for name, f in s.formats.items()
        },
        histograms,
    )


def _worst_experts(experts: Tensor, s: LinearStatistics) -> dict[HealthMeasure, tuple[Any, Any]]:
    """By measure the worst expert and its value, lists [formats][operands]."""
    if not len(experts):
        return {}
    microbatches, tokens, *squares = experts[:, : len(EXPERT_COLUMNS)].unbind(1)
    weights = microbatches * s.in_features * s.out_features
    sizes = torch.stack([tokens * s.in_features, weights, tokens * s.out_features], 1)[:, None]
    sums = experts[:, len(EXPERT_COLUMNS) :].view(len(experts), -1, len(Operand), 3)
    error, zeros, _ = sums.unbind(-1)  # [experts, formats, operands]
    sqnr = 10 * torch.log10(torch.stack(squares, 1)[:, None] / error)
    measured: dict[HealthMeasure, Tensor] = {"sqnr_db": sqnr, "underflow": zeros / sizes}
    found: dict[HealthMeasure, tuple[Any, Any]] = {}
    for measure, values in measured.items():
        sign = -MEASURES[measure][1]
        worst = (sign * values).masked_fill(~values.isfinite(), -math.inf).max(0)
        found[measure] = worst.indices.tolist(), (sign * worst.values).tolist()
    return found


def health_table(
    table: StatisticsTable, rows: tuple[Tensor, Tensor, Sequence[Tensor]], grad_scale: float
) -> HealthTable:
    """Return the health of the observed linears.

    Args:
        table: their statistics.
        rows: of each linear over all ranks: NORMS numbers, then OPERAND_SUMS of each format and
            operand; amax of X, W and G; its experts' rows (EXPERT_COLUMNS), or none.
        grad_scale: factor from G as the linear sees it to the gradient of the batch-mean loss.
    """
    (sums, amax, experts), linears = rows, []
    for row in zip(table.linears, sums.tolist(), amax.tolist(), experts, strict=True):
        if row[0].microbatches:
            linears.append(_linear_health(*row, grad_scale))
    return HealthTable(table.iteration, tuple(linears))


def _db(signal: float, error: float) -> float | None:
    ratio = signal / error if error > 0 else math.inf
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def _trimmed(bins: Sequence[float], shift: float) -> tuple[float, list[float]] | None:
    total = sum(bins)
    if not 0 < total < math.inf:
        return None
    filled = list(compress(range(len(bins)), bins))  # not zero
    shares = [count / total for count in bins[filled[0] : filled[-1] + 1]]
    return filled[0] + LOWEST_LOG2 + shift, shares


def _spread(bins: Sequence[float], shift: float) -> tuple[float, float, float] | None:
    if (histogram := _trimmed(bins, shift)) is None:
        return None
    low, shares = histogram
    middle = next(i for i, below in enumerate(accumulate(shares)) if below >= 0.5 - 1e-9)
    return low, low + middle, low + len(shares) - 1


def _square(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
    return norm.double().square()
