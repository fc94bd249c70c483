"""Pass A: in every linear's backward, measure the errors of every format on offer.

The model runs in BF16 (or whatever it trains in) as if SNIP were off; taps (tap.py) hand over
X, W and G, and `measure.py` computes the errors. Communication happens in the same order on all
tensor-parallel ranks even when one of them fails to measure: a failure is noted, zeros take part
in the collectives, and the controller turns it into one decision for all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_snip.collectives import sum_over
from megatron_snip.formats import get_format
from megatron_snip.quantizers import needs_tensor_amax
from megatron_snip.statistics.measure import (
    Operands,
    exact_output,
    exact_weight_gradient,
    fprop_error,
    squared_norm,
    token_products,
    token_squares,
    wgrad_error,
)
from megatron_snip.statistics.observation import Observation, SampledRows
from megatron_snip.statistics.records import ACROSS, ACROSS_BY_FORMAT, COUPLINGS
from megatron_snip.statistics.sampling import sampled_rows
from megatron_snip.statistics.sketch import WIDTH, SketchSigns
from megatron_snip.statistics.tap import all_tokens, tap
from megatron_snip.streams import grad_output_stream
from megatron_snip.topology import Placement, TensorAxis, Topology


@dataclass(frozen=True)
class MeasureSettings:
    """What a refresh measures.

    Attributes:
        formats: names of the quantized formats on offer.
        step: the training step (0-based).
        seed: the run's seed.
        num_rows: sampled tokens a microbatch.
        num_probes: probes (passes B) that are averaged.
    """

    formats: tuple[str, ...]
    step: int
    seed: int
    num_rows: int
    num_probes: int = 1


@dataclass
class _OutputSums:
    """Sums of Y and of each format's eY, once whole."""

    squares: list[torch.Tensor]  # 1 + F of [M]: |Y_t|^2, then |eY_t|^2
    shift: list[torch.Tensor]  # F scalars: <eY, Y>

    @classmethod
    def of(cls, exact: torch.Tensor) -> _OutputSums:
        """Start with Y [M, N]."""
        return cls([token_squares(exact)], [])

    def add(self, error: torch.Tensor, exact: torch.Tensor) -> None:
        """Add one format's eY [M, N]."""
        self.squares.append(token_squares(error))
        self.shift.append(token_products(error, exact).sum())


@dataclass
class _Fprop:
    """What fprop's errors give on this shard; F formats.

    A row-parallel linear's outputs are partial sums, held until they are whole; a column-parallel
    linear's are whole, and only their sums are held.
    """

    partial: list[torch.Tensor]  # row: 1 + F of [M, N]: Y, then eY of each format
    sums: _OutputSums | None  # column
    first: list[torch.Tensor] = field(default_factory=list)  # F of [M]: <G_t, eY_t>
    errors: list[torch.Tensor] = field(default_factory=list)  # F of [2]: |dX|^2, |dW|^2


@dataclass
class _Wgrad:
    """What wgrad's errors give on this shard; F formats."""

    norm: torch.Tensor  # |dW|^2
    errors: list[torch.Tensor]  # F of [3]: |dG|^2, |eW|^2, |D * eW|^2
    sketches: list[torch.Tensor]  # 1 + F of [WIDTH]: of dW, then of D * eW of each format


@dataclass
class _Local:
    """What one shard measured."""

    partial: list[torch.Tensor]  # see `_Fprop`
    sums: _OutputSums | None
    first: torch.Tensor  # [F, M]: <G_t, eY_t> of this shard
    weight_norms: torch.Tensor  # [2]: |W|^2, |dW|^2
    input_norm: torch.Tensor  # |X|^2
    errors: torch.Tensor  # [F, 5]
    sketches: torch.Tensor  # [1 + F, WIDTH] of dW, then of D * eW of each format
    amax: tuple[torch.Tensor, torch.Tensor] | None  # of X and G, where a format asks


class Recorder:
    """Collects an `Observation` a linear and microbatch.

    Attributes:
        observations: by `Placement.instance`, in microbatch order.
        failure: the first error met while measuring on this rank, or None.
        signs: of the refresh's sketches.
    """

    def __init__(
        self,
        settings: MeasureSettings,
        topology: Topology,
        sensitivity: Mapping[str, torch.Tensor],
    ) -> None:
        """Start with nothing observed.

        Args:
            settings: what to measure.
            topology: this rank's place.
            sensitivity: D [N, K] of each trained linear's shard, by `Placement.instance`.
        """
        self.settings = settings
        self.observations: dict[str, list[Observation]] = defaultdict(list)
        self.failure: str | None = None
        self.signs = SketchSigns(settings.seed, settings.step)
        self._topology = topology
        self._sensitivity = sensitivity

    def observe(
        self,
        placement: Placement,
        input: torch.Tensor,
        weight: torch.Tensor,
        output: torch.Tensor,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        """See `tap.Observer`."""

        def on_backward(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> None:
            with torch.no_grad():
                tokens = all_tokens(x, placement.tensor, sequence_parallel)
                operands = Operands(tokens, w, g.reshape(-1, g.shape[-1]))
                self.record(placement, operands)

        return tap(output, input, weight, on_backward)

    def record(self, placement: Placement, operands: Operands) -> None:
        """All ranks of the linear's tensor axis: measure one microbatch of one linear."""
        seen = self.observations[placement.instance]
        data = self._topology.data_axis(placement)
        microbatch = len(seen) * data.size + data.rank
        rows = self._rows(operands.input.shape[0], microbatch).to(operands.input.device)
        local = None
        try:
            local = self._measure(placement, operands, microbatch)
        except Exception as error:
            self.failure = self.failure or f"{placement.name}: {type(error).__name__}: {error}"
        if local is None:  # out of the handler: the error held all that had been made
            local = self._nothing(placement, operands)
        seen.append(self._joined(placement, operands, rows, microbatch, local))

    def _rows(self, num_tokens: int, microbatch: int) -> torch.Tensor:
        s = self.settings
        return sampled_rows(num_tokens, s.num_rows, s.seed, s.step, microbatch)

    def _measure(self, placement: Placement, operands: Operands, microbatch: int) -> _Local:
        # One GEMM after the other: neither holds what the other one makes.
        wgrad = self._measure_wgrad(placement, operands, microbatch)
        fprop = self._measure_fprop(placement, operands)
        input_weight = torch.stack(fprop.errors)
        return _Local(
            fprop.partial,
            fprop.sums,
            torch.stack(fprop.first),
            torch.stack([squared_norm(operands.weight), wgrad.norm]),
            squared_norm(operands.input),
            torch.cat([input_weight, torch.stack(wgrad.errors)], dim=1),
            torch.stack(wgrad.sketches),
            self._amax(operands),
        )

    def _measure_fprop(self, placement: Placement, operands: Operands) -> _Fprop:
        exact = exact_output(operands)
        row = placement.kind == "row"
        found = _Fprop([exact] if row else [], None if row else _OutputSums.of(exact))
        for name in self.settings.formats:
            e = fprop_error(operands, exact, name)
            found.first.append(token_products(operands.grad_output, e.output))
            found.errors.append(torch.stack([e.input_square, e.weight_square]))
            if found.sums is None:
                found.partial.append(e.output)
            else:
                found.sums.add(e.output, exact)
            del e  # before the next format's is formed
        return found

    def _measure_wgrad(self, placement: Placement, operands: Operands, microbatch: int) -> _Wgrad:
        sensitivity = self._sensitivity.get(placement.instance)
        stream = grad_output_stream(self.settings.seed, placement, self.settings.step, microbatch)
        sketcher = self.signs.sketcher(placement, 0, operands.weight.device)
        exact = exact_weight_gradient(operands)
        found = _Wgrad(squared_norm(exact), [], [sketcher.of_matrix(exact)])
        for name in self.settings.formats:
            e = wgrad_error(operands, exact, name, stream)
            square = squared_norm(e.weight_gradient)
            weighted, common = torch.zeros_like(square), torch.zeros_like(found.sketches[0])
            if sensitivity is not None:  # a frozen weight has no update to change
                change = e.weight_gradient.mul_(sensitivity)
                weighted, common = squared_norm(change), sketcher.of_matrix(change)
                del change
            found.sketches.append(common)
            found.errors.append(torch.stack([e.grad_square, square, weighted]))
            del e  # before the next format's is formed
        return found

    def _amax(self, operands: Operands) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not any(needs_tensor_amax(get_format(name)) for name in self.settings.formats):
            return None
        if not operands.input.numel():  # an expert without tokens
            return None
        return operands.input.abs().amax(), operands.grad_output.abs().amax()

    def _nothing(self, placement: Placement, operands: Operands) -> _Local:
        """Zeros of the shapes that `_measure` gives, for the collectives of a failed rank."""
        num_formats = len(self.settings.formats)
        tokens, n = operands.input.shape[0], operands.weight.shape[0]
        device = operands.input.device

        def wide(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        row = placement.kind == "row"
        count = 1 + num_formats if row else 0
        return _Local(
            [torch.zeros((tokens, n), device=device) for _ in range(count)],
            None
            if row
            else _OutputSums([wide(tokens)] * (1 + num_formats), [wide()] * num_formats),
            wide(num_formats, tokens),
            wide(2),
            wide(),
            wide(num_formats, 5),
            wide(1 + num_formats, WIDTH),
            None,
        )

    def _joined(
        self,
        placement: Placement,
        operands: Operands,
        rows: torch.Tensor,
        microbatch: int,
        local: _Local,
    ) -> Observation:
        """Form the sums that need whole tensors, and weigh what every rank holds in full."""
        column = placement.kind == "column"
        share = 1.0 / placement.tensor.size
        sums = local.sums or _joined_sums(local.partial, placement.tensor)
        # Held in full by every rank of the axis: X (column), Y, eY and G (row).
        input_share, output_share = (share, 1.0) if column else (1.0, share)
        output_tokens = torch.stack(sums.squares) * output_share  # [1 + F, M]
        grad = token_squares(operands.grad_output) * output_share
        shift = torch.stack(sums.shift) * output_share
        errors = torch.cat([local.errors, shift[:, None]], dim=1)
        errors[:, 0] *= input_share
        errors[:, 2] *= output_share
        norms = torch.stack(
            [
                local.input_norm * input_share,
                local.weight_norms[0],
                output_tokens[0].sum(),
                grad.sum(),
                local.weight_norms[1],
            ]
        )
        by_format = len(ACROSS_BY_FORMAT)
        sketches = errors.new_zeros((len(ACROSS) + by_format * len(errors), WIDTH))
        first = len(ACROSS) + ACROSS_BY_FORMAT.index("local_square")
        sketches[first::by_format] = local.sketches[1:]
        x, g = operands.input, operands.grad_output
        return Observation(
            microbatch=microbatch,
            rows=rows,
            first=local.first,
            norms=norms,
            errors=errors,
            output_error=output_tokens[1:],
            grad=grad,
            couplings=errors.new_zeros((len(errors), len(COUPLINGS), 2)),
            scalings=errors.new_zeros((2, 2)),
            sketches=sketches,
            wgrad=local.sketches[0],
            probe=errors.new_zeros(4),
            sampled=SampledRows(x[rows], g[rows], *(local.amax or (None, None))),
        )


def _joined_sums(partial: list[torch.Tensor], axis: TensorAxis) -> _OutputSums:
    """All ranks of the tensor axis: make the outputs whole, one after the other, and sum."""
    exact = sum_over(partial[0], axis.group)
    sums = _OutputSums.of(exact)
    for i in range(1, len(partial)):
        sums.add(sum_over(partial[i], axis.group), exact)
    return sums
