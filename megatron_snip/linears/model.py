"""All planned linears of this rank: install the seam, apply a plan, undo."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from megatron_snip.config import Backend as BackendChoice
from megatron_snip.errors import UnsupportedError
from megatron_snip.linears import backends
from megatron_snip.linears.backends import Backend, Machine
from megatron_snip.linears.layout import find_linears, global_linears
from megatron_snip.linears.native_support import agreed, with_native
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.seam import PlannedLinear
from megatron_snip.linears.te_modules import te_kind
from megatron_snip.linears.te_seam import PlannedTELinear, TEModule
from megatron_snip.linears.te_support import this_machine
from megatron_snip.linears.te_weights import FreshWeights
from megatron_snip.log import warn_once
from megatron_snip.options import Option
from megatron_snip.statistics.sensitivity import PlannedWeight
from megatron_snip.topology import LinearInfo, Placement, Topology
from megatron_snip.types import Gemm

logger = logging.getLogger(__name__)

AnyLinear = PlannedLinear | PlannedTELinear


class PlannedModel:
    """Megatron's model chunks with every linear of their layers under SNIP.

    Attributes:
        runtime: shared by all linears of this process.
        linears: this rank's, in model order.
        all_linears: every linear of the model, in the same order on all ranks.
        machine: what decides how Transformer Engine's linears run.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        topology: Topology,
        seed: int,
        backend: BackendChoice = "auto",
    ) -> None:
        """All ranks: find the linears and agree on their global order.

        Raises:
            UnsupportedError: if ranks disagree about a linear, no rank has any, or the backend
                cannot run them.
        """
        self.chunks = list(model)
        self.runtime = Runtime(topology, seed)
        found = find_linears(model, topology)
        self.machine = this_machine(with_te=any(te_kind(module) for module, _ in found))
        if backend != "simulate":
            if any(te_kind(module) is None for module, _ in found):
                self.machine = with_native(self.machine)
            self.machine = agreed(self.machine, topology.control)
            _warn_of_hopper(self.machine)
        self.linears = _planned(found, self.runtime, backend, self.machine)
        self._fresh = _fresh_weights(self.chunks, self.linears)
        self.all_linears: tuple[LinearInfo, ...] = global_linears([p for _, p in found], topology)
        if not self.all_linears:
            raise UnsupportedError(
                "the model's layers have no linears to plan: neither Megatron's "
                "ColumnParallelLinear and RowParallelLinear nor Transformer Engine's"
            )

    def install(self) -> None:
        """Override every linear; idempotent."""
        for linear in (*self.linears, *self._fresh):
            linear.install()

    def uninstall(self) -> None:
        """Put Megatron's own methods back; idempotent."""
        for linear in (*self.linears, *self._fresh):
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

    def weights(self, names: frozenset[str] | None = None) -> dict[str, PlannedWeight]:
        """Return this rank's trained weights of the named linears, by instance, in model order."""
        return {
            linear.placement.instance: PlannedWeight(linear.placement, linear.weight)
            for linear in self.linears
            if linear.weight.requires_grad and (names is None or linear.placement.name in names)
        }

    def approximations(self, options: Sequence[Option]) -> list[str]:
        """Return a line for each format that this rank's backend runs as a neighbouring one."""
        if not self._fresh:
            return []
        where = backends.column(self.machine.capability)
        lines = {}
        for name in dict.fromkeys(name for option in options for name in option.formats):
            cells = [backends.support(Backend.TE, name, gemm, where) for gemm in Gemm]
            whys = dict.fromkeys(c.why for c in cells if c.how is backends.How.APPROXIMATED)
            if whys:
                runs = "differs" if cells[0].word == name else f"runs as {cells[0].word}"
                lines[name] = f"{name} {runs} under Transformer Engine: {'; '.join(whys)}"
        return list(lines.values())


def _planned(
    found: Sequence[tuple[torch.nn.Module, Placement]],
    runtime: Runtime,
    backend: BackendChoice,
    machine: Machine,
) -> list[AnyLinear]:
    """Give every linear its backend."""
    grouped: dict[int, list[Placement]] = {}
    for module, placement in found:
        grouped.setdefault(id(module), []).append(placement)
    linears: list[AnyLinear] = []
    for module, placement in found:
        placements = grouped.pop(id(module), None)
        if placements is None:
            continue  # a further expert of a module that has been seen
        is_te = te_kind(module) is not None
        _check_backend(backend, is_te, placement, machine)
        if is_te:
            shared = TEModule(module, placements, runtime, machine)
            linears += [PlannedTELinear(shared, i) for i in range(len(placements))]
        else:
            linears.append(PlannedLinear(module, placement, runtime, backend, machine))
    return linears


def _check_backend(
    backend: BackendChoice, is_te: bool, placement: Placement, machine: Machine
) -> None:
    """Refuse a linear that the chosen backend does not run.

    Raises:
        UnsupportedError: one line with the remedy.
    """
    if backend == "native":
        cell = backends.here(Backend.NATIVE, "fp8", Gemm.FPROP, machine)
        if cell.how is backends.How.REFUSED:
            raise UnsupportedError(f"--snip-backend native: {cell.why}; use simulate")
    if is_te and backend in ("simulate", "native"):
        raise UnsupportedError(
            f"--snip-backend {backend} runs Megatron's own linears, and {placement.name} is "
            "Transformer Engine's; use --transformer-impl local, or --snip-backend te"
        )
    if not is_te and backend == "te":
        raise UnsupportedError(
            f"--snip-backend te runs Transformer Engine's linears, and {placement.name} is "
            "Megatron's own; use --transformer-impl transformer_engine, or --snip-backend simulate"
        )


def _warn_of_hopper(machine: Machine) -> None:
    """Say once why a GPU that should multiply in FP8 does not; linears are simulated then."""
    if machine.native_obstacle and backends.column(machine.capability) == "9.0":
        warn_once(logger, f"linears do not run natively: {machine.native_obstacle}")


def _fresh_weights(
    chunks: Sequence[torch.nn.Module], linears: Sequence[AnyLinear]
) -> list[FreshWeights]:
    planned = {id(p.module) for p in linears if isinstance(p, PlannedTELinear)}
    inside = [[m for m in chunk.modules() if id(m) in planned] for chunk in chunks]
    return [FreshWeights(c, modules) for c, modules in zip(chunks, inside, strict=True) if modules]
