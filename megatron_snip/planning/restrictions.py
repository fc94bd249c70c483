"""What linears cannot run: problems without those options, and the options that stand in for them.

Everything here is arithmetic on names: no solver, no model.
"""

from collections.abc import Iterable, Mapping

from megatron_snip.formats import get_format
from megatron_snip.options import BF16, Option
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem, parse_option

Refusals = Mapping[Option, Mapping[str, str]]
"""Option -> linears that cannot run it -> reason."""


def restrict_problem(problem: PlanningProblem, refusals: Refusals) -> PlanningProblem:
    """Return a problem whose linears list only what they can run; BF16 if that is nothing."""
    bf16 = {str(BF16): OptionCost(quality_loss=0.0, saving=0.0)}

    def left(row: LinearChoices) -> dict[str, OptionCost]:
        options = row.options.items()
        runs = {n: c for n, c in options if row.name not in refusals.get(parse_option(n), {})}
        return runs or bf16

    return problem.with_options(left)


def nearest_option(option: Option, candidates: Iterable[Option]) -> Option:
    """Return `option` if it is a candidate, else the nearest one of no lower precision, else BF16.

    That is one with at least as many bits in every GEMM and the fewest bits in total; the first of
    them on a tie.
    """
    options = (*candidates, BF16)
    if option in options:
        return option
    fits = [
        o for o in options if all(a >= b for a, b in zip(bits_of(o), bits_of(option), strict=True))
    ]
    return min(fits, key=lambda other: sum(bits_of(other)))


def reasons(refused: Mapping[str, str]) -> str:
    """Return the first three distinct reasons why linears cannot run an option, in one line."""
    distinct = list(dict.fromkeys(refused.values()))
    more = f" and {len(distinct) - 3} other reasons" if len(distinct) > 3 else ""
    return "; ".join(distinct[:3]) + more


def bits_of(option: Option) -> list[int]:
    """Return the bits of each GEMM's format: fprop, dgrad, wgrad."""
    return [get_format(name).bits for name in option.formats]
