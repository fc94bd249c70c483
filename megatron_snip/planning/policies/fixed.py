"""Policies that optimize nothing: every linear at one option, or everything as it was.

They heed pins and no other rule: an efficiency target would forbid what they are asked for. Their
plans carry target 0 and status `fixed`.
"""

from __future__ import annotations

import numpy as np

from megatron_snip.errors import UsageError
from megatron_snip.options import BF16
from megatron_snip.planning.policies.policy import Decision, Request
from megatron_snip.planning.rules import Rules
from megatron_snip.planning.table import Ints, canonical


class UniformPolicy:
    """Every linear takes the same option; `uniform-bf16`, `uniform-fp8`, `uniform-fp4-fp8-fp8`."""

    def __init__(self, option: str) -> None:
        self.option = canonical(option)
        self.name = f"uniform-{option}"
        self.wants_bf16 = self.option == str(BF16)
        self.minimizes_loss = False

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

    def decide(self, request: Request) -> Decision:
        """Return the previous plan's columns; see `Policy`."""
        columns = request.hint
        if columns is None:
            columns = request.table.columns_of([str(BF16)] * len(request.table.options))
        return _fixed(request, columns, "the previous plan's option")


def _fixed(request: Request, columns: Ints, wanted: str) -> Decision:
    columns = _with_pins(request.rules, columns)
    missing = np.flatnonzero(columns < 0)
    if len(missing):
        table, row = request.table, int(missing[0])
        raise UsageError(
            f"policy '{request.settings.policy}': {wanted} is not among the options of "
            f"'{table.names[row]}' ({', '.join(table.options[row])})"
        )
    loss = request.table.quality_loss(columns)
    return Decision(columns, "fixed", None if np.isnan(loss) else loss)


def _with_pins(rules: Rules, columns: Ints) -> Ints:
    """Overwrite what is pinned.

    Raises:
        InfeasiblePlanError: if two pins disagree on a linear.
    """
    rules.check_pins()
    columns = columns.copy()
    for pin in rules.pins:
        columns = np.where(pin.columns >= 0, pin.columns, columns)
    return columns
