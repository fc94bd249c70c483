"""All planned linears of this rank: install the seam, apply a plan, undo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.layout import find_linears, global_linears
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.seam import PlannedLinear
from megatron_snip.options import Option
from megatron_snip.statistics.reduce import LinearInfo
from megatron_snip.statistics.sensitivity import PlannedWeight
from megatron_snip.topology import Topology


class PlannedModel:
    """Megatron's model chunks with every linear of their layers under SNIP.

    Attributes:
        runtime: shared by all linears of this process.
        linears: this rank's, in model order.
        all_linears: every linear of the model, in the same order on all ranks.
    """

    def __init__(self, model: Sequence[torch.nn.Module], topology: Topology, seed: int) -> None:
        """All ranks: find the linears and agree on their global order.

        Raises:
            UnsupportedError: if ranks disagree about a linear, or no rank has any.
        """
        self.chunks = list(model)
        self.runtime = Runtime(topology, seed)
        found = find_linears(model, topology)
        self.linears = [PlannedLinear(m, p, self.runtime) for m, p in found]
        self.all_linears: tuple[LinearInfo, ...] = global_linears([p for _, p in found], topology)
        if not self.all_linears:
            raise UnsupportedError(
                "the model's layers have no ColumnParallelLinear or RowParallelLinear to plan; "
                "Transformer Engine's linears are not supported: use --transformer-impl local"
            )

    def install(self) -> None:
        """Override every linear; idempotent."""
        for linear in self.linears:
            linear.install()

    def uninstall(self) -> None:
        """Put Megatron's own methods back; idempotent."""
        for linear in self.linears:
            linear.uninstall()

    def apply(self, options: Mapping[str, Option]) -> int:
        """Set every linear of this rank to its option; call between steps, on all ranks.

        Args:
            options: by linear name; must hold every linear of this rank.

        Returns:
            How many of this rank's linears changed.
        """
        changed = 0
        for linear in self.linears:
            option = options[linear.placement.name]
            changed += option != linear.option
            linear.option = option
        return changed

    def weights(self) -> dict[str, PlannedWeight]:
        """This rank's planned weights that train, by instance, in model order."""
        return {
            linear.placement.instance: PlannedWeight(linear.placement, linear.weight)
            for linear in self.linears
            if linear.weight.requires_grad
        }
