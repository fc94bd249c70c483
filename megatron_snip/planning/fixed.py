"""Linears whose option is fixed before any plan is made: by the user, the job's rules or limits.

`available_options` (linears/availability.py) makes the one list of a run; all its plans obey it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_snip.options import Option
from megatron_snip.types import glob_matches, split_linear_name


class Source(StrEnum):
    """What fixes a linear; the value is how messages and files call it."""

    PIN = "--snip-pins"
    """A pin of the user's."""

    FILE = "--te-precision-config-file"
    """A rule of the user's precision file. The linear runs what the job itself runs there."""

    EDGE = "--first-last-layers-bf16"
    """The linear is in the first or last layers that the job keeps in BF16."""

    TIE = "fused operations"
    """Its operations are fused with those of a linear that a pin or a rule fixes."""

    SMALL = "--snip-small-linears job"
    """It is small: a low format may be slower there than BF16."""

    LIMIT = "stored weights or shapes"
    """It can run none of the run's options but what the job itself runs."""

    @property
    def is_rule(self) -> bool:
        """Whether a plan file that contradicts it is refused."""
        return self is not Source.LIMIT

    @property
    def is_of_the_job(self) -> bool:
        """Whether `--snip-pins GLOB=free` gives the linear back to the planner."""
        return self in (Source.FILE, Source.EDGE)


@dataclass(frozen=True)
class Fixed:
    """The one option of a linear, and what fixes it."""

    option: Option
    source: Source


FixedLinears = Mapping[str, Fixed]
"""Linear -> what it is fixed to; linears that are absent are the planner's."""


def fixed_pins(
    fixed: FixedLinears, names: Sequence[str], given: Sequence[tuple[str, Option]]
) -> tuple[tuple[str, str], ...]:
    """Return the rules among the fixed linears as the planner's pins: (glob, option).

    Args:
        fixed: the fixed linears.
        names: all linears of the model, in its order.
        given: the pins of the user. One that holds for all its linears stays as it was written.
    """
    ruled = {name: each.option for name, each in fixed.items() if each.source.is_rule}
    pins = []
    covered: set[str] = set()
    for glob, option in given:
        matching = [name for name in names if glob_matches(name, glob)]
        # `_pinned` may have left out a linear of the glob (it cannot run the option). Then the
        # others are written below, by layer or by name.
        if all(ruled.get(name) == option for name in matching):
            pins.append((glob, str(option)))
            covered.update(matching)
    for name in names:
        if name not in ruled or name in covered:
            continue
        # One pin for a layer that is fixed as one, as first and last layers are: every plan of the
        # run checks and lists these pins, and a large model has thousands of linears.
        block, layer, _ = split_linear_name(name)
        glob = f"{block}.layers.{layer}.*"
        members = [other for other in names if glob_matches(other, glob)]
        if any(ruled.get(other) != ruled[name] or other in covered for other in members):
            glob = name
            members = [name]
        pins.append((glob, str(ruled[name])))
        covered.update(members)
    return tuple(pins)


def by_source(fixed: FixedLinears) -> dict[str, dict[str, Any]]:
    """Return {source: {linears: their number, example: `name=option` of the first}}."""
    found: dict[str, dict[str, Any]] = {}
    for source in Source:
        of_source = {name: each.option for name, each in fixed.items() if each.source is source}
        if of_source:
            name, option = next(iter(of_source.items()))
            found[str(source)] = {"linears": len(of_source), "example": f"{name}={option}"}
    return found


def summary(fixed: FixedLinears, num_linears: int) -> str:
    """Return the counts by source, with an example of each, in one line."""
    parts = [
        f"{row['linears']} by {source} (such as {row['example']})"
        for source, row in by_source(fixed).items()
    ]
    return f"{len(fixed)} of {num_linears} linears are fixed: {', '.join(parts)}"
