"""What SNIP does with one of Megatron's settings: the rows of `fast_flags` and `incompatible`.

runs       nothing special: plans change while the job trains
restricts  plans change, and some linears have fewer options; the run logs which
measures   linears cannot change: the run measures, as with `--snip-collect-only`, and says so
refuses    the job ends with a line: the reason and what to do
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Effect = Literal["runs", "restricts", "measures", "refuses"]


@dataclass(frozen=True)
class FlagRow:
    """One setting, or a combination of settings.

    Attributes:
        flag: the setting, as users write it.
        is_on: whether Megatron's namespace has it; a missing attribute is off.
        plans: what a run with plans does under it. `refuses` holds for runs that only measure, too.
        text: how SNIP runs under it, or why not; a clause that follows `flag: `.
        num_recipes: how many of the published recipes in tests/recipes have it.
        remedy: what to do instead of a flag that is refused, as an imperative.
    """

    flag: str
    is_on: Callable[[Namespace], bool]
    plans: Effect
    text: str
    num_recipes: int = 0
    remedy: str = "drop it"

    @property
    def refusal(self) -> str | None:
        """One line why SNIP cannot run with it; None if it can."""
        if self.plans != "refuses":
            return None
        return f"--snip cannot run with {self.flag}: {self.text}; {self.remedy}"


def given(*names: str) -> Callable[[Namespace], bool]:
    """Return a condition: any of these attributes is set to something other than `none`."""

    def is_on(args: Namespace) -> bool:
        values = [getattr(args, name, None) for name in names]
        # By identity: 0 is a value that is given.
        return any(v is not None and v is not False and v != "none" for v in values)

    return is_on
