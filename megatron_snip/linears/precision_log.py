"""What every linear resolved to after a plan change: `precision/<iteration>.json` of a run.

A plan names options; the backend, the machine and Transformer Engine decide what runs. The table
has both, for the entire model, as the ranks that hold the linears report them:

    linear          name, the same under every layout
    option          what the plan gives it
    recipe          what runs it: `megatron` (its own BF16 GEMMs), `simulated`, or Transformer
                    Engine's recipe
    backend         simulate or te
    weight storage  dtype of the parameter between steps, or the class of a quantized one

If the ranks or experts that hold a linear report different values, they are joined by ` / `.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_snip.collectives import gather_json
from megatron_snip.linears.model import AnyLinear
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.types import natural_key

VERSION = 2


def precision_table(
    linears: Sequence[AnyLinear], plan: PrecisionPlan, iteration: int, control: ProcessGroup | None
) -> dict[str, Any]:
    """All ranks, after a plan was applied: return what all linears of the model resolved to.

    It is the content of precision/<iteration>.json, with the linears in the plan's order.

    Args:
        linears: this rank's.
        plan: the current one.
        iteration: the first that runs under it.
        control: group of all ranks; None for one.
    """
    own = [
        [linear.name, str(linear.option), linear.recipe, linear.backend, _storage(weight)]
        for linear in linears
        for weight in linear.weights
    ]
    by_name: dict[str, list[list[str]]] = {}
    for rank in gather_json(own, control):
        for name, *values in rank:
            by_name.setdefault(name, []).append(values)
    order = {name: i for i, name in enumerate(plan.linears)}
    names = sorted(by_name, key=lambda name: (order.get(name, len(order)), natural_key(name)))
    columns = ("option", "recipe", "backend", "weight_storage")
    rows = []
    for name in names:
        values = (" / ".join(dict.fromkeys(each)) for each in zip(*by_name[name], strict=True))
        rows.append({"name": name, **dict(zip(columns, values, strict=True))})
    return {
        "version": VERSION,
        "iteration": iteration,
        "plan_iteration": plan.iteration,
        "plan_digest": plan.digest,
        "linears": rows,
    }


def _storage(weight: torch.nn.Parameter) -> str:
    """A parameter that Transformer Engine stores quantized is of a class of its own."""
    kind = type(weight.data)
    return str(weight.dtype).removeprefix("torch.") if kind is torch.Tensor else kind.__name__
