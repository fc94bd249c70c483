"""Which options each linear can run here, as all ranks agree; problems and plans cut to them.

Megatron's own linears simulate every option. Transformer Engine's run what its recipes, the GPU
and their shapes allow: what it cannot do is not offered to the solver, and a plan from elsewhere
is brought to what can run, never silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch.distributed import ProcessGroup

from megatron_snip.collectives import gather_json
from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import get_format
from megatron_snip.options import BF16, Option
from megatron_snip.planning.problem import OptionCost, PlanningProblem
from megatron_snip.topology import Placement
from megatron_snip.types import Gemm

_SHOWN = 3


class Refusing(Protocol):
    """A linear that knows what it cannot run."""

    placement: Placement

    def refusal(self, option: Option) -> str | None:
        """Return why the linear cannot run `option` here, or None if it can."""


class Runnable:
    """What the linears of the whole model can run.

    `learn` an option on all ranks before anything else is asked about it.
    """

    def __init__(self, linears: Sequence[Refusing], control: ProcessGroup | None) -> None:
        self._linears = linears
        self._control = control
        self._reasons: dict[Option, dict[str, str]] = {BF16: {}}

    def learn(self, options: Iterable[Option]) -> None:
        """All ranks, with the same options: find out which linears cannot run them, and why."""
        new = [option for option in dict.fromkeys(options) if option not in self._reasons]
        if not new:
            return
        own = [[str(option), self._own(option)] for option in new]
        merged: dict[str, dict[str, str]] = {}
        for ranks in gather_json(own, self._control):
            for text, reasons in ranks:
                merged.setdefault(text, {}).update(reasons)
        for option in new:
            self._reasons[option] = merged[str(option)]

    def refused(self, option: Option) -> Mapping[str, str]:
        """Return the linears (of all ranks) that cannot run `option` -> why not."""
        return self._reasons[option]

    def _own(self, option: Option) -> dict[str, str]:
        found = {linear.placement.name: linear.refusal(option) for linear in self._linears}
        return {name: reason for name, reason in found.items() if reason is not None}


def offered(
    runnable: Runnable, options: Sequence[Option], names: Sequence[str], lowest_format: str
) -> tuple[tuple[Option, ...], list[str]]:
    """Return the options that some linear can run, and what to warn of.

    Args:
        runnable: has learned `options`.
        options: what the settings put on offer, in order.
        names: every linear of the model.
        lowest_format: what the efficiency target counts.

    Raises:
        UnsupportedError: if no linear can run the lowest precision, so that the target would
            mean nothing.
    """
    kept, warnings = [], []
    for option in options:
        refused = runnable.refused(option)
        if len(refused) < len(names):
            kept.append(option)
        if refused:
            which = "any linear" if option not in kept else _linears(len(refused))
            warnings.append(f"{option} is not offered to {which}: {_why(refused)}")
    if not any(option.share_in(lowest_format) for option in kept):
        reason = _why(runnable.refused(Option.uniform(lowest_format)))
        raise UnsupportedError(
            f"no linear of this model can run {lowest_format}, the lowest precision on offer: "
            f"{reason}; offer other formats (--snip-formats) or use --transformer-impl local"
        )
    return tuple(kept), warnings


def restricted(runnable: Runnable, problem: PlanningProblem) -> PlanningProblem:
    """Return a planning problem whose linears list only what they can run, BF16 at least."""
    bf16 = {str(BF16): OptionCost(quality_loss=0.0, saving=0.0)}
    rows = []
    for row in problem.linears:
        options = {
            text: cost
            for text, cost in row.options.items()
            if row.name not in runnable.refused(Option.parse(text))
        }
        rows.append(row.model_copy(update={"options": options or bf16}))
    return problem.model_copy(update={"linears": tuple(rows)})


def nearest(
    runnable: Runnable, linears: Mapping[str, Option], candidates: Sequence[Option]
) -> dict[str, Option]:
    """Return an assignment that can run: each option itself, or the nearest (see `at_least`).

    Args:
        runnable: has learned the options of `linears` and `candidates`.
        linears: option of each linear.
        candidates: what a linear may be brought to.
    """
    result = {}
    for name, option in linears.items():
        fits = [o for o in (option, *candidates) if name not in runnable.refused(o)]
        result[name] = at_least(option, fits)
    return result


def at_least(option: Option, candidates: Sequence[Option]) -> Option:
    """Return `option` if it is a candidate, else the nearest one that loses nothing, else BF16.

    That is one with at least as many bits in every GEMM and the fewest bits in total; the first of
    them on a tie.
    """
    if option in candidates:
        return option
    fits = [other for other in (*candidates, BF16) if _loses_nothing(other, option)]
    return min(fits, key=_bits)


def told_changes(
    runnable: Runnable, before: Mapping[str, Option], after: Mapping[str, Option]
) -> list[str]:
    """Return a line for each pair of options that `nearest` exchanged, with the reason."""
    pairs = Counter((before[name], after[name]) for name in before if before[name] != after[name])
    return [
        f"{new} in place of {old} for {_linears(count)}: {_why(runnable.refused(old))}"
        for (old, new), count in pairs.items()
    ]


def _loses_nothing(new: Option, old: Option) -> bool:
    return all(get_format(new[g]).bits >= get_format(old[g]).bits for g in Gemm)


def _bits(option: Option) -> int:
    return sum(get_format(name).bits for name in option.formats)


def _linears(count: int) -> str:
    return "1 linear" if count == 1 else f"{count} linears"


def _why(refused: Mapping[str, str]) -> str:
    """Return the distinct reasons, the first few of them."""
    reasons = list(dict.fromkeys(refused.values()))
    more = "" if len(reasons) <= _SHOWN else f" and {len(reasons) - _SHOWN} other reasons"
    return "; ".join(reasons[:_SHOWN]) + more
