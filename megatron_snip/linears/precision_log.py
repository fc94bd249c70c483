"""What every linear resolved to, once a plan change: `--snip-precision-log`.

A plan names options; what runs is decided by the backend, the machine and Transformer Engine. The
table says both, for the whole model, as the ranks that hold the linears have it:

    linear          name, the same under every layout
    option          what the plan gives it
    recipe          what runs it: `megatron` (its own BF16 GEMMs), `simulated`, or Transformer
                    Engine's recipe
    backend         simulate, native or te
    weight storage  how the parameter lies in memory between steps

A linear that several ranks or experts hold should resolve alike on all of them; where it does not,
what differs is joined by ` / `, so that nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from megatron_snip.collectives import gather_json
from megatron_snip.linears.backends import Backend
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.topology import Placement
from megatron_snip.types import natural_key

VERSION = 1


class Resolved(Protocol):
    """A planned linear, as `seam.PlannedLinear` and `te_seam.PlannedTELinear` are."""

    @property
    def placement(self) -> Placement:
        """Name and shard."""

    @property
    def option(self) -> Option:
        """What the plan gives it."""

    @property
    def recipe(self) -> str:
        """What runs its GEMMs, for people."""

    @property
    def backend(self) -> Backend:
        """Who runs them."""

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight of this shard."""


@dataclass(frozen=True)
class LinearPrecision:
    """One row; see the file's description.

    Attributes:
        name: of the linear.
        option: as users write it.
        recipe: what runs it.
        backend: who runs it.
        weight_storage: dtype of the parameter, or the class of a tensor that is stored quantized.
    """

    name: str
    option: str
    recipe: str
    backend: str
    weight_storage: str


@dataclass(frozen=True)
class PrecisionTable:
    """What every linear resolved to under a plan.

    Attributes:
        step: the first training step (0-based) that runs so.
        plan_step: iteration (1-based) of the statistics behind the plan.
        plan_digest: of the plan.
        linears: a row each, in the model's order.
    """

    step: int
    plan_step: int
    plan_digest: str
    linears: tuple[LinearPrecision, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, as precision/<step>.json holds them."""
        return {"version": VERSION, **asdict(self), "linears": [asdict(r) for r in self.linears]}

    def text(self) -> str:
        """Return a table for people, one line a linear."""
        head = ("linear", "option", "recipe", "backend", "weight storage")
        rows = [head, *(tuple(asdict(row).values()) for row in self.linears)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        title = (
            f"precision from step {self.step} on (plan of iteration {self.plan_step}, digest "
            f"{self.plan_digest[:12]})"
        )
        return "\n".join((title, *lines))


def precision_table(
    linears: Sequence[Resolved],
    plan: PrecisionPlan,
    step: int,
    control: ProcessGroup | None,
) -> PrecisionTable:
    """All ranks, after a plan was applied: return what all linears of the model resolved to.

    Args:
        linears: this rank's.
        plan: in force.
        step: the first training step that runs under it.
        control: joins all ranks; None for one alone.
    """
    own = [asdict(_row(linear)) for linear in linears]
    merged: dict[str, list[LinearPrecision]] = {}
    for rows in gather_json(own, control):
        for row in rows:
            merged.setdefault(row["name"], []).append(LinearPrecision(**row))
    order = {name: i for i, name in enumerate(plan.linears)}
    names = sorted(merged, key=lambda name: (order.get(name, len(order)), natural_key(name)))
    return PrecisionTable(
        step, plan.iteration, plan.digest, tuple(_joined(merged[n]) for n in names)
    )


def _row(linear: Resolved) -> LinearPrecision:
    return LinearPrecision(
        name=linear.placement.name,
        option=str(linear.option),
        recipe=linear.recipe,
        backend=str(linear.backend),
        weight_storage=_storage(linear.weight),
    )


def _storage(weight: torch.nn.Parameter) -> str:
    """A parameter that Transformer Engine stores quantized is of a class of its own."""
    kind = type(weight.data)
    return str(weight.dtype).removeprefix("torch.") if kind is torch.Tensor else kind.__name__


def _joined(rows: Sequence[LinearPrecision]) -> LinearPrecision:
    return LinearPrecision(
        rows[0].name,
        _all(row.option for row in rows),
        _all(row.recipe for row in rows),
        _all(row.backend for row in rows),
        _all(row.weight_storage for row in rows),
    )


def _all(words: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(words))
