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
        plans: what a run with plans does under it.
        text: how SNIP runs under it, or why not; a clause that follows `flag: `.
        num_recipes: how many of the published recipes in tests/recipes have it.
        collects: what `--snip-collect-only` does under it: `runs` or `refuses`.
        remedy: what to do instead of a flag that is refused, as an imperative.
    """

    flag: str
    is_on: Callable[[Namespace], bool]
    plans: Effect
    text: str
    num_recipes: int = 0
    collects: Effect = "runs"
    remedy: str = "drop it"

    def refusal(self, collect_only: bool) -> str | None:
        """Return one line why SNIP cannot run with it, or None."""
        if self.plans != "refuses":
            return None
        if collect_only and self.collects != "refuses":
            return None
        advice = self.remedy
        if self.collects != "refuses":
            advice += ", or add --snip-collect-only"
        return f"--snip cannot run with {self.flag}: {self.text}; {advice}"


def given(*names: str) -> Callable[[Namespace], bool]:
    """Return a condition: any of these attributes is set to something other than `none`."""

    def is_on(args: Namespace) -> bool:
        values = [getattr(args, name, None) for name in names]
        # By identity: 0 is a value that is given.
        return any(v is not None and v is not False and v != "none" for v in values)

    return is_on
