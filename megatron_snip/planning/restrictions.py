"""What linears cannot run: problems without those options, and the options that stand in for them.

Everything here is arithmetic on names: no solver, no model.
"""

from collections.abc import Iterable, Mapping

from megatron_snip.formats import get_format
from megatron_snip.options import BF16, Option
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem, parse_option

Refusals = Mapping[Option, Mapping[str, str]]
"""Option -> linears that cannot run it -> reason."""


def restrict_problem(
    problem: PlanningProblem,
    refusals: Refusals,
    job: Mapping[str, Option] | None = None,
    lowest_format: str = "bf16",
) -> PlanningProblem:
    """Return a problem whose linears list only what they can run.

    Args:
        problem: all options of each linear.
        refusals: the options that linears cannot run.
        job: what the job runs each linear in; a linear that is absent runs BF16. A linear that can
            run none of its options keeps that.
        lowest_format: the format that the target counts.
    """

    def left(row: LinearChoices) -> dict[str, OptionCost]:
        options = row.options.items()
        runs = {n: c for n, c in options if row.name not in refusals.get(parse_option(n), {})}
        kept = (job or {}).get(row.name, BF16)
        saving = kept.share_in(lowest_format) if kept != BF16 else 0.0
        return runs or {str(kept): OptionCost(quality_loss=0.0, saving=saving)}

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
