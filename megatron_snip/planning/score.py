"""What a recipe costs by a run's measurements, whoever made it: a plan, a file, a rule or a policy.

A recipe gives every linear of a problem an option. Its share is the share of FLOPs in the lowest
precision, its quality loss the sum of the measured ones. Beside it stand SNIP's plan of the same
share, the best policy without measurements, and the two ends: every linear in its lowest option,
every linear in its highest.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_snip.errors import InfeasiblePlanError, UsageError
from megatron_snip.log import log_failure, warn_once
from megatron_snip.options import BF16, Option
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import POLICIES
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem, parse_option
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.types import split_linear_name

logger = logging.getLogger(__name__)

NUM_SHOWN = 3
"""Linears that are named of each kind."""

_BF16_COST = OptionCost(quality_loss=0.0, saving=0.0)


class Rule(NamedTuple):
    """A policy without measurements, and the quality loss of its plan."""

    policy: str
    quality_loss: float


class Ends(NamedTuple):
    """The costs of a linear's lowest and highest option, of those that were measured."""

    lowest: OptionCost
    highest: OptionCost


@dataclass(frozen=True)
class Choice:
    """What one linear's option costs.

    Attributes:
        linear: its name.
        option: what the recipe gives it.
        quality_loss: what its lowest option costs above its highest one.
        share: the linear's share of all FLOPs.
    """

    linear: str
    option: str
    quality_loss: float
    share: float


@dataclass(frozen=True)
class Score:
    """A recipe by the measurements of a problem.

    Attributes:
        name: what the user called it.
        share: share of the FLOPs in the lowest precision.
        quality_loss: sum over linears; None if an option of it was not measured.
        unmeasured: linears with an option that the problem has no number for, as `NAME: OPTION`.
        snip: quality loss of SNIP's plan with at least this share; None if there is none.
        rule: the best policy that needs no measurements, with its plan of at least this share; None
            if no policy makes one.
        between: where the quality loss stands between that of all linears high (0) and all low (1);
            None if these are equal.
        costly: linears that are low and cost most.
        idle: linears that are high although the lowest option would cost little: the least quality
            loss for their FLOPs first.
    """

    name: str
    share: float
    quality_loss: float | None
    unmeasured: tuple[str, ...]
    snip: float | None
    rule: Rule | None
    between: float | None
    costly: tuple[Choice, ...]
    idle: tuple[Choice, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of `megatron-snip score --json`."""
        return {
            **vars(self),
            "rule": None if self.rule is None else self.rule._asdict(),
            "unmeasured": list(self.unmeasured),
            "costly": [vars(choice) for choice in self.costly],
            "idle": [vars(choice) for choice in self.idle],
        }


class Scorer:
    """Scores recipes of one problem; plans of equal shares are made once.

    Args:
        problem: the measured problem. Its pins and target are not used: a recipe is judged by all
            that was measured.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem.model_copy(update={"pins": ()})
        self._total = math.fsum(row.flops for row in problem.linears)
        self._ends = {row.name: _ends(row) for row in problem.linears}
        self._snip: dict[float, float | None] = {}
        self._rules: dict[float, Rule | None] = {}

    def score(self, name: str, linears: Mapping[str, Option]) -> Score:
        """Return the score of a recipe.

        Args:
            name: what the user calls it.
            linears: the option of every linear of the problem.

        Raises:
            UsageError: if a linear of the problem has no option.
        """
        missing = [row.name for row in self.problem.linears if row.name not in linears]
        if missing:
            raise UsageError(f"{name}: no option for {len(missing)} linears, such as {missing[0]}")
        losses: list[float] = []
        saved: list[float] = []
        unmeasured = []
        low: list[tuple[float, Choice]] = []  # with what to sort by
        high: list[tuple[float, Choice]] = []
        for row in self.problem.linears:
            option = str(linears[row.name])
            cost = _cost(row, option)
            if cost is None or cost.quality_loss is None:
                unmeasured.append(f"{row.name}: {option}")
                continue
            losses.append(cost.quality_loss)
            saved.append(cost.saving * row.flops)
            ends = self._ends[row.name]
            if ends is None or ends.lowest.saving == ends.highest.saving:
                continue  # nothing to choose between
            lowest, highest = map(_loss, ends)
            difference = lowest - highest
            choice = Choice(row.name, option, difference, self._share(row.flops))
            if cost.saving > ends.highest.saving:
                low.append((cost.quality_loss - highest, choice))
            else:  # what lowering it would cost, per FLOP that it would save
                high.append((difference / row.flops if row.flops else math.inf, choice))
        share = self._share(math.fsum(saved))
        loss = None if unmeasured else math.fsum(losses)
        low.sort(key=lambda found: -found[0])
        high.sort(key=lambda found: found[0])
        return Score(
            name=name,
            share=share,
            quality_loss=loss,
            unmeasured=tuple(unmeasured),
            snip=self._snip_at(share),
            rule=self._rule_at(share),
            between=None if loss is None else self._between(loss),
            costly=tuple(choice for _, choice in low[:NUM_SHOWN]),
            idle=tuple(choice for _, choice in high[:NUM_SHOWN]),
        )

    def policy(self, name: str, target: float) -> dict[str, Option]:
        """Return what a policy gives every linear at a target.

        Raises:
            UsageError: if the policy is unknown or does not fit the problem.
            InfeasiblePlanError: if no plan reaches the target.
        """
        return make_plan(self.problem, PlanSettings(policy=name, target=target)).linears

    def low_and_high(self, is_high: Callable[[str], bool]) -> dict[str, Option]:
        """Return BF16 for the linears that `is_high` names, and the lowest option for others.

        Args:
            is_high: whether a linear, by its name, stays in BF16.
        """
        return {
            row.name: BF16 if is_high(row.name) else parse_option(_lowest(row))
            for row in self.problem.linears
        }

    def _share(self, flops: float) -> float:
        return flops / self._total if self._total else 0.0

    def _between(self, loss: float) -> float | None:
        known = [ends for ends in self._ends.values() if ends is not None]
        lowest = math.fsum(_loss(ends.lowest) for ends in known)
        highest = math.fsum(_loss(ends.highest) for ends in known)
        return None if lowest == highest else (loss - highest) / (lowest - highest)

    def _snip_at(self, share: float) -> float | None:
        if share not in self._snip:
            self._snip[share] = self._loss_of("snip", share)
        return self._snip[share]

    def _rule_at(self, share: float) -> Rule | None:
        if share not in self._rules:
            found = []
            for policy in POLICIES.values():
                # A random order is no rule: the best of its seeds is chance.
                if policy.needs_statistics or policy.name.startswith("random"):
                    continue
                try:
                    loss = self._loss_of(policy.name, share)
                except Exception as error:  # a plugin's mistake must not end the others' scores
                    what = f"policy '{policy.name}'"
                    reason = log_failure(logger, what, error)
                    warn_once(logger, f"{what} is no rule to compare with: {reason}")
                    continue
                if loss is not None:
                    found.append(Rule(policy.name, loss))
            # Of equal losses the first name, so that the order of plugins does not matter.
            best = min(found, key=lambda rule: (rule.quality_loss, rule.policy), default=None)
            self._rules[share] = best
        return self._rules[share]

    def _loss_of(self, policy: str, share: float) -> float | None:
        """Return the quality loss of a policy's plan with a share; None if it makes none."""
        try:
            target = min(share, 1.0)  # a sum of doubles can be a little above 1
            plan = make_plan(self.problem, PlanSettings(policy=policy, target=target))
        except (InfeasiblePlanError, UsageError):  # its options do not fit, or do not reach it
            return None
        return plan.objective


def last_blocks(names: Iterable[str], share: float) -> Callable[[str], bool]:
    """Return whether a linear is in the last blocks: the rule that keeps these in BF16.

    Layers of multi-token prediction come after the last block and count with it.

    Args:
        names: the linears.
        share: the share of the decoder's layers, rounded up to complete layers.
    """
    layers = _decoder_layers(names)
    # 0.15 of 20 layers are 3, and not the 4 that 3.0000000000000004 would be rounded up to.
    first = len(layers) - math.ceil(share * len(layers) - 1e-9)
    kept = set(layers[first:])
    return lambda name: _layer(name) in kept or name.startswith("mtp.")


def first_last(names: Iterable[str], first: int, last: int) -> Callable[[str], bool]:
    """Return whether a linear is in the first or last layers of the decoder.

    Raises:
        UsageError: if the decoder has fewer layers than one of the two numbers.
    """
    layers = _decoder_layers(names)
    if max(first, last) > len(layers):
        raise UsageError(f"first-last:{first},{last}: the decoder has {len(layers)} layers")
    kept = {*layers[:first], *layers[len(layers) - last :]}
    return lambda name: _layer(name) in kept


def _decoder_layers(names: Iterable[str]) -> list[int]:
    found = {_layer(name) for name in names} - {None}
    return sorted(layer for layer in found if layer is not None)


def _layer(name: str) -> int | None:
    block, layer, _ = split_linear_name(name)
    return layer if block == "decoder" else None


def _cost(row: LinearChoices, option: str) -> OptionCost | None:
    """Return what an option costs a linear; None if it was not measured."""
    return row.options.get(option, _BF16_COST if option == str(BF16) else None)


def _lowest(row: LinearChoices) -> str:
    """Return the option of a linear with the largest saving, and of these the cheapest."""
    return min(row.options, key=lambda name: (-row.options[name].saving, _loss(row.options[name])))


def _ends(row: LinearChoices) -> Ends | None:
    """Return the ends of a linear; None if no option of it was measured."""
    known = [cost for cost in row.options.values() if cost.quality_loss is not None]
    if not known:
        return None
    return Ends(
        lowest=min(known, key=lambda cost: (-cost.saving, _loss(cost))),
        highest=min(known, key=lambda cost: (cost.saving, _loss(cost))),
    )


def _loss(cost: OptionCost) -> float:
    """Return an option's quality loss; infinite if it was not measured."""
    return math.inf if cost.quality_loss is None else cost.quality_loss
