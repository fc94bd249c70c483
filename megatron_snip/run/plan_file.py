"""Checks of a plan file: settings that contradict it, and recipes that have changed."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from megatron_snip.config import FREE, SnipConfig
from megatron_snip.errors import UsageError, listing
from megatron_snip.files import read_json
from megatron_snip.linears.model import PlannedModel
from megatron_snip.planning.fixed import Source
from megatron_snip.run.fitting import Replacement


def check_plan_file(replaced: Sequence[Replacement], config: SnipConfig, num_linears: int) -> None:
    """Refuse a plan file that contradicts what is fixed, or the formats of the same command.

    Args:
        replaced: what had to change so that the file's plan fits the run.
        config: the settings.
        num_linears: the number of linears of the plan.

    Raises:
        UsageError: if something fixed or the formats had to change it.
    """
    values = {
        str(Source.PIN): f" ({listing(config.pins)})",
        "--snip-formats": f" ({listing(config.named_formats)})",
    }
    # What a linear cannot run is no contradiction: the run has replaced it, and reports that.
    contradictions = [each for each in replaced if each.is_setting]
    if not contradictions:
        return
    reason = contradictions[0].reason  # one at a time: an error is one line
    names = [each.linear for each in replaced if each.reason == reason]
    remedy = "change one of the two"
    if reason in (Source.FILE, Source.EDGE):
        remedy += f", or give these linears to the plan: --snip-pins '{names[0]}={FREE}'"
    raise UsageError(
        f"the plan breaks {reason}{values.get(reason, '')} at {len(names)} of "
        f"{num_linears} linears: {listing(names, 3)}; {remedy}",
        field="plan_file",
    )


def recipe_changes(plan_file: Path, digest: str, model: PlannedModel) -> list[str]:
    """Return a line for each option that the run of a plan file ran by another recipe.

    That run wrote what its linears ran under the plan into a folder beside the plan's:
    precision/<iteration>.json. Without such a file nothing is known, and nothing is returned.

    Args:
        plan_file: the plan's file.
        digest: the plan's.
        model: the planned linears.
    """
    before: dict[str, str] = {}
    for path in sorted((plan_file.parent.parent / "precision").glob("*.json")):
        with contextlib.suppress(UsageError, KeyError, TypeError):  # it only serves a message
            table = read_json(path, "precision file", plain=True)
            if table["plan_digest"] == digest:
                before = {str(row["option"]): str(row["recipe"]) for row in table["linears"]}
                break
    now = {str(linear.option): linear.recipe for linear in model.linears}
    return [
        f"{option} was {before[option]} in the run of '{plan_file}', and is {recipe} here"
        for option, recipe in now.items()
        if before.get(option, recipe) != recipe
    ]
