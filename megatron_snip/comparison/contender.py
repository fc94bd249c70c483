"""Contender: one way of choosing precision that takes part in a comparison.

    bf16, fp8, ...    a format's name: every linear in that format
    lowest            every linear in the lowest format of the table in question
    random ...        the planner's policies (planning/policies), a linear at a time
    snip-linear       snip, one format a linear (the paper's)
    snip-gemm         snip, fprop, dgrad and wgrad each choose

A configuration adds others, such as snip with another lambda, as a name and the settings of SNIP
that it changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_snip.config import make_config
from megatron_snip.errors import UsageError
from megatron_snip.formats import FORMATS
from megatron_snip.options import Option
from megatron_snip.planning.policies import get_policy

BASELINE = "bf16"
"""What gaps are counted from."""

LOWEST = "lowest"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,79}")
"""Of a contender that a configuration adds."""

SETTINGS = frozenset(
    {"policy", "granularity", "loss_join", "weight_lambda", "pins"},
)
"""What may differ between contenders: who plans and how divergences join, nothing else."""


@dataclass(frozen=True)
class Contender:
    """A name and what it sets.

    Attributes:
        name: as tables list it.
        settings: SNIP's settings that it changes; `policy` is always among them.
    """

    name: str
    settings: Mapping[str, Any] = field(hash=False)

    @property
    def policy(self) -> str:
        """Who makes its plans."""
        return str(self.settings["policy"])

    @property
    def uniform(self) -> Option | None:
        """The option that every linear takes, or None; such a contender heeds no target."""
        prefix = "uniform-"
        if not self.policy.startswith(prefix):
            return None
        return Option.parse(self.policy.removeprefix(prefix))

    @property
    def measured(self) -> bool:
        """Whether its plans need statistics."""
        return get_policy(self.policy).needs_statistics


POLICIES = ("random", "layer-id", "layer-type", "min-abs-err", "min-rel-err", "greedy")

BUILT_IN: dict[str, Contender] = {
    **{name: Contender(name, {"policy": f"uniform-{name}"}) for name in FORMATS},
    **{name: Contender(name, {"policy": name}) for name in POLICIES},
    "snip-linear": Contender("snip-linear", {"policy": "snip", "granularity": "linear"}),
    "snip-gemm": Contender("snip-gemm", {"policy": "snip", "granularity": "gemm"}),
}
"""Contenders that need no configuration."""

DEFAULT = (BASELINE, "fp8", LOWEST, *POLICIES, "snip-linear", "snip-gemm")
"""Who takes part unless told otherwise."""


def make_contender(name: str, settings: Mapping[str, Any]) -> Contender:
    """Return a contender that a configuration describes.

    Raises:
        UsageError: if it changes what contenders have in common, or a value is no good.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"contender '{name[:80]}': files are named after it, so a name is 1 to 80 letters, "
            "digits, '.', '_', '+' and '-', the first a letter or digit"
        )
    foreign = sorted(set(settings) - SETTINGS, key=str)
    if foreign:
        raise UsageError(
            f"contender '{name}' sets '{foreign[0]}'; it may set {', '.join(sorted(SETTINGS))}"
        )
    values = {"policy": "snip", **settings}
    if name in BUILT_IN or name == LOWEST:
        raise UsageError(f"contender '{name}' exists already; give yours another name")
    contender = Contender(name, values)
    make_config(values)
    get_policy(contender.policy)
    if contender.uniform is not None and len(set(contender.uniform.formats)) > 1:
        values.setdefault("granularity", "gemm")
    return contender


def resolve(name: str, lowest: str, added: Mapping[str, Contender]) -> Contender:
    """Return the contender called `name` in the table of a lowest format.

    Raises:
        UsageError: if there is none.
    """
    if name == LOWEST:
        return BUILT_IN[lowest]
    found = added.get(name) or BUILT_IN.get(name)
    if found is None:
        known = (*DEFAULT, *added)
        raise UsageError(f"unknown contender '{name}'; known: {', '.join(known)}, any format")
    return found
