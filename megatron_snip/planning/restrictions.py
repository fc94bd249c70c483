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
        problem: The problem with all options of each linear.
        refusals: The options that linears cannot run.
        job: The option in which the job itself runs each linear; BF16 for linears that are absent.
            A linear that can run none of the problem's options has this one.
        lowest_format: The format that the target counts.
    """

    def runnable(linear: LinearChoices) -> dict[str, OptionCost]:
        options = {}
        for text, cost in linear.options.items():
            if linear.name not in refusals.get(parse_option(text), {}):
                options[text] = cost
        if not options:
            own = (job or {}).get(linear.name, BF16)
            saving = own.share_in(lowest_format) if own != BF16 else 0.0
            options[str(own)] = OptionCost(quality_loss=0.0, saving=saving)
        return options

    return problem.with_options(runnable)


def nearest_option(option: Option, candidates: Iterable[Option]) -> Option:
    """Return `option` if it is a candidate, else the nearest one of no lower precision, else BF16.

    "Of no lower precision": with at least as many bits in every GEMM. The nearest one of these has
    the fewest bits in total; it is the first of them on a tie.
    """
    options = (*candidates, BF16)
    if option in options:
        return option
    wanted = bits_of(option)

    def is_no_lower(other: Option) -> bool:
        return all(bits >= least for bits, least in zip(bits_of(other), wanted, strict=True))

    return min(filter(is_no_lower, options), key=lambda other: other.bits)


def reasons(refused: Mapping[str, str]) -> str:
    """Return the first three distinct reasons why linears cannot run an option, in one line."""
    distinct = list(dict.fromkeys(refused.values()))
    more = f" and {len(distinct) - 3} other reasons" if len(distinct) > 3 else ""
    return "; ".join(distinct[:3]) + more


def bits_of(option: Option) -> list[int]:
    """Return the bits of each GEMM's format: fprop, dgrad, wgrad."""
    return [get_format(name).bits for name in option.formats]
