"""The records that leave a refresh: sums over all tokens, microbatches and ranks, as floats.

Units are those of the loss and of the gradient of the batch-mean loss; `divergence/` turns sums
into divergences. Symbols as in `statistics/measure.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class FormatStatistics:
    """Errors of one linear with its operands in one format.

    Attributes:
        first: sum over tokens of <G, eY>: signed first-order loss change.
        first_abs: sum over microbatches of |first of the microbatch|.
        first_square: sum over microbatches of (first of the microbatch)^2.
        fisher: 1/2 sum_t |eY_t|^2 |G_t|^2 T / N: second-order loss change, directions at random.
        aligned_fisher: 1/2 sum_t <G_t, eY_t>^2 T: the same with the errors' own directions.
        output_shift: sum <eY, Y>; over output_square it is c, the part of eY along Y.
        forward_channel_square: fwd^2, update change through eY (probe), channels apart.
        forward_scale_square: c^2 scale^2, update change through c Y, channels together.
        forward_whole_square: fwd^2, all channels together: one sample a probe.
        forward_whole_variance: of one probe's, from the sample of tokens alone (coherence.py).
        forward_square: fwd^2 as it is used, of the four above (pooling.py).
        backward_square: bwd^2, update change through eX (probe).
        local_square: loc^2 = |D * eW|^2, update change through eW; like the squares above of the
            sum over microbatches, what they have in common estimated (sketch.py).
        output_error_square: sum |eY|^2.
        input_error_square: sum |Q(X) - X|^2.
        weight_error_square: |Q(W) - W|^2, summed over microbatches.
        grad_error_square: sum |Q(G) - G|^2.
        wgrad_error_square: sum over microbatches of |eW|^2.
    """

    first: float = 0.0
    first_abs: float = 0.0
    first_square: float = 0.0
    fisher: float = 0.0
    aligned_fisher: float = 0.0
    output_shift: float = 0.0
    forward_channel_square: float = 0.0
    forward_scale_square: float = 0.0
    forward_whole_square: float = 0.0
    forward_whole_variance: float = 0.0
    forward_square: float = 0.0
    backward_square: float = 0.0
    local_square: float = 0.0
    output_error_square: float = 0.0
    input_error_square: float = 0.0
    weight_error_square: float = 0.0
    grad_error_square: float = 0.0
    wgrad_error_square: float = 0.0


@dataclass(frozen=True)
class LinearStatistics:
    """All statistics of one linear (of all its experts, for an MoE layer).

    Attributes:
        name: layout-independent name.
        stage: pipeline stage that holds it.
        in_features: K, global.
        out_features: N, global.
        flops_per_token: FLOPs of its three GEMMs for one token.
        microbatches: number of microbatches summed (over all data ranks).
        tokens: number of tokens summed.
        input_square: sum |X|^2.
        weight_square: |W|^2, summed over microbatches.
        output_square: sum |Y|^2 (without bias).
        grad_square: sum |G|^2.
        wgrad_square: sum over microbatches of |dW|^2.
        update_square: |update|^2 of the optimizer's current step direction.
        probe_tokens: how many of them the probe compared.
        probe_input_square: sum over tokens of |dX / eps|^2 (from the sample), noise included.
        probe_input_noise: the part of it that rounding alone gives.
        probe_grad_square: sum over tokens of |dG / eps|^2 (from the sample), noise included.
        probe_grad_noise: the part of it that rounding alone gives.
        scale_square: scale^2, update change with the scale of Y (probe), channels together.
        scale_channel_square: the same with channels apart.
        formats: per format name.
    """

    name: str
    stage: int
    in_features: int
    out_features: int
    flops_per_token: float
    microbatches: float = 0.0
    tokens: float = 0.0
    input_square: float = 0.0
    weight_square: float = 0.0
    output_square: float = 0.0
    grad_square: float = 0.0
    wgrad_square: float = 0.0
    update_square: float = 0.0
    probe_tokens: float = 0.0
    probe_input_square: float = 0.0
    probe_input_noise: float = 0.0
    probe_grad_square: float = 0.0
    probe_grad_noise: float = 0.0
    scale_square: float = 0.0
    scale_channel_square: float = 0.0
    formats: dict[str, FormatStatistics] = field(default_factory=dict)


@dataclass(frozen=True)
class StatisticsTable:
    """What one refresh measured, the same on every rank.

    Attributes:
        step: training step (0-based) whose microbatches were measured.
        loss: mean loss of those microbatches, or None where the model reported none.
        probe_step: eps, the factor of the probe's perturbation eps * D * r.
        linears: one entry a linear, in global order.
    """

    step: int
    loss: float | None
    probe_step: float
    linears: tuple[LinearStatistics, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain built-in types, with the schema's version."""
        return {"version": SCHEMA_VERSION, **dataclasses.asdict(self)}


DERIVED = ("forward_scale_square", "forward_whole_variance", "forward_square")
"""Fields of a format that reduce.py fills in from the columns."""

COUPLINGS = ("forward_channel_square", "backward_square", "forward_whole_square")
SCALES = ("scale_square", "scale_channel_square")
"""Fields that travel in two parts each (coherence.py), of a format and of a linear."""

WHOLES = ("scale_square", "forward_whole_square")
"""Squares of one sum over all channels, by linear and by format."""

ACROSS = SCALES
ACROSS_BY_FORMAT = (*COUPLINGS, "local_square")
"""Fields to which microbatches add what they have in common, in the order of the sketches."""

BASE_COLUMNS: tuple[str, ...] = tuple(
    f.name
    for f in dataclasses.fields(LinearStatistics)
    if f.type == "float" and f.name not in ("flops_per_token", *SCALES)
)
"""The additive fields of `LinearStatistics`, in the order of the reduced table's columns."""

FORMAT_COLUMNS: tuple[str, ...] = tuple(
    f.name for f in dataclasses.fields(FormatStatistics) if f.name not in (*DERIVED, *COUPLINGS)
)
"""The additive fields of `FormatStatistics`, repeated for each format in the reduced table."""
