"""What a run showed, in a few lines: what `megatron-snip train` prints at its end."""

from megatron_snip.planning.problem import OptionCost
from megatron_snip.reporting.run_record import RunRecord
from megatron_snip.reporting.text import option_counts, percent

NUM_FRAGILE = 3
"""Linears that are named."""


def lessons(run: RunRecord) -> list[str]:
    """Return the most fragile linears of the last refresh, and the current plan.

    A linear's share is its part of the quality loss of the plan that gives the lowest precision to
    every linear. Empty without a refresh and without a plan. Without the plan if the run has
    turned SNIP off since.
    """
    lines = []
    losses = _lowest_precision_losses(run)
    total = sum(losses.values())
    if total > 0.0:
        fragile = sorted(losses, key=lambda name: -losses[name])[:NUM_FRAGILE]
        shares = ", ".join(f"{name} {percent(losses[name] / total)}" for name in fragile)
        formats = run.lowest_formats_label
        lines.append(f"most fragile in {formats}, by share of the quality loss: {shares}")
    is_off = run.snip is not None and not run.snip.enabled  # it was on before a resume
    if run.plan is not None and not is_off:
        text = f"plan: {option_counts(run.plan.linears)}"
        text += f"; {percent(run.metrics.last('lowest_precision_fraction'))} of the FLOPs in "
        text += run.lowest_formats_label
        share = run.quality_share(run.plan.objective)
        if share is not None:
            text += (
                f" at {percent(share)} of the quality loss of {run.lowest_formats_label} everywhere"
            )
        lines.append(text)
    return lines


def _lowest_precision_losses(run: RunRecord) -> dict[str, float]:
    """Return {linear: its quality loss with all GEMMs in the lowest precision}."""
    if run.problem is None:
        return {}

    def lowest(options: dict[str, OptionCost]) -> OptionCost:
        return max(options.values(), key=lambda cost: cost.saving)

    found = {each.name: lowest(each.options).quality_loss for each in run.problem.linears}
    return {name: loss for name, loss in found.items() if loss is not None}
