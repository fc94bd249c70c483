"""Policies that optimize nothing: every linear at one option, or everything as it was.

They keep to pins, to the limit on changes and off forbidden options, or say that they cannot. They
heed no efficiency target, which would forbid what they are asked for: their plans carry target 0
and status `fixed`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_snip.errors import UsageError
from megatron_snip.options import BF16
from megatron_snip.planning.policies.policy import Decision, Request
from megatron_snip.planning.problem import canonical
from megatron_snip.planning.rules import Pin
from megatron_snip.planning.table import Ints


class UniformPolicy:
    """Every linear takes the same option; `uniform-bf16`, `uniform-fp8`, `uniform-fp4-fp8-fp8`."""

    def __init__(self, option: str) -> None:
        self.option = canonical(option)
        self.name = f"uniform-{option}"
        self.wants_bf16 = self.option == str(BF16)
        self.minimizes_loss = False
        self.heeds_target = False

    def decide(self, request: Request) -> Decision:
        """Set every linear that is not pinned to the option; see `Policy`."""
        table = request.table
        columns = table.columns_of([self.option] * len(table.options))
        return _fixed(request, columns, self.option)


class NonePolicy:
    """Change nothing: the previous plan, or bf16 everywhere where there is none."""

    name = "none"
    wants_bf16 = True
    minimizes_loss = False
    heeds_target = False

    def decide(self, request: Request) -> Decision:
        """Return the previous plan's columns; see `Policy`."""
        columns = request.hint
        if columns is None:
            columns = request.table.columns_of([str(BF16)] * len(request.table.options))
        return _fixed(request, columns, "the previous plan's option")


def _fixed(request: Request, columns: Ints, wanted: str) -> Decision:
    """Hold every linear that the user did not pin to `columns`, as if it were pinned as well.

    Raises:
        InfeasiblePlanError: if pins, forbidden options or the limit on changes forbid that.
        UsageError: if a linear has no such option.
    """
    table, rules = request.table, request.rules
    pinned = np.zeros(len(columns), dtype=np.bool_)
    for pin in rules.pins:
        pinned |= pin.columns >= 0
    own = Pin(f"policy {request.settings.policy}", np.where(pinned, -1, columns))
    missing = np.flatnonzero((columns < 0) & ~pinned)
    if len(missing):
        row = int(missing[0])
        raise UsageError(
            f"policy '{request.settings.policy}': {wanted} is not among the options of "
            f"'{table.names[row]}' ({', '.join(table.options[row])})"
        )
    task = replace(rules, target=0.0, balance="none", pins=(*rules.pins, own)).checked_task()
    only: Ints = task.allowed.argmax(axis=1)
    return Decision(only, "fixed", table.quality_loss(only), task)
