"""Plans and planning problems of another run, made to fit this one.

A plan comes from a file or a checkpoint, a problem from a checkpoint; the run that made them may
have had other settings, another machine or another parallel layout. The settings of this run hold:

    a fixed linear            gets its option (planning/fixed.py)
    other linears             get formats among --snip-formats and bf16, or what the job itself runs
    an option that a linear   is replaced by the nearest one of no lower precision; if the linear
    cannot run                cannot run that one, by what the job itself runs there
    tied linears              get one option, of the most bits
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.linears.availability import AvailableOptions
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import BF16, Option, Refusals, nearest_option, reasons
from megatron_snip.planning.plan import PrecisionPlan, StageAndFlops, assigned_plan
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem, parse_option
from megatron_snip.planning.ties import TIED
from megatron_snip.run.solve import PendingProblem


@dataclass(frozen=True)
class Replacement:
    """A linear that cannot have the option of another run's plan here.

    Attributes:
        linear: name of the linear.
        old: the linear's option in the plan.
        new: the option that the linear gets.
        reason: the flag that rules the old one out, or why the linear cannot run it.
        is_setting: whether `reason` is a flag.
    """

    linear: str
    old: Option
    new: Option
    reason: str
    is_setting: bool


class Fitting:
    """Makes plans and problems fit a run; all ranks call every method together."""

    def __init__(
        self,
        config: SnipConfig,
        model: PlannedModel,
        available: AvailableOptions,
        stage_and_flops: StageAndFlops,
    ) -> None:
        """Keep what a plan or problem has to fit.

        Args:
            config: the settings.
            model: the planned linears.
            available: what they can run.
            stage_and_flops: (stage, FLOPs per token) by linear.
        """
        self._config = config
        self._model = model
        self._available = available
        self._stage_and_flops = stage_and_flops
        # In the model's order: all ranks ask for the same options in the same order.
        self._fixed_options = tuple(dict.fromkeys(f.option for f in available.fixed.values()))

    def plan(self, plan: PrecisionPlan) -> tuple[PrecisionPlan, list[Replacement]]:
        """Return a plan as this run allows it, and what had to change.

        Its stages are those of this run, and its efficiencies those of this run's stages and lowest
        precision.

        Args:
            plan: a plan of the same linears, of this run or another one.

        Raises:
            UsageError: if it is a plan of other linears.
        """
        plan.check_against(self._stage_and_flops)
        used = plan.linears.values()
        candidates = (*used, *self._available.options, *self._fixed_options, BF16)
        refusals = self._model.refusals_of(candidates)
        replaced = []
        for name, old in plan.linears.items():
            replacement = self._replacement(name, old, refusals)
            if replacement is not None:
                replaced.append(replacement)
        linears = {**plan.linears, **{each.linear: each.new for each in replaced}}
        # Replacements can give tied linears different options.
        for replacement in list(self._untied(linears, refusals)):
            replaced.append(replacement)
            linears[replacement.linear] = replacement.new
        stage_layers = self._available.job.stage_layers
        fitted = assigned_plan(
            linears,
            self._stage_and_flops,
            lowest_format=self._config.lowest_format,
            policy=plan.policy,
            iteration=plan.iteration,
            stage_layers=stage_layers,
        )
        if replaced:
            return fitted, replaced
        update: dict[str, Any] = {"stage_layers": stage_layers}
        # A plan of this layout that counts seconds has efficiencies that FLOPs do not give.
        if self._config.cost != "time" or len(plan.stages) != len(fitted.stages):
            update |= {"efficiency": fitted.efficiency, "stages": fitted.stages}
        return plan.model_copy(update=update), []

    def _replacement(self, name: str, old: Option, refusals: Refusals) -> Replacement | None:
        """Return what a linear gets in place of an option; None if it keeps it."""
        can_run = [o for o in self._available.options if name not in refusals[o]]
        job = self._available.job.options[name]
        fixed = self._available.fixed.get(name)
        if fixed is not None and not fixed.source.is_rule:
            fixed = None  # what the linear can run says it more exactly: bf16, for example
        wanted = old if fixed is None else fixed.option
        if name in refusals[wanted]:
            new = nearest_option(wanted, can_run)
            if name in refusals[new]:  # BF16, where a linear's weight is stored in another format
                new = job
            reason = refusals[wanted][name]
            is_setting = False
        elif fixed is not None:
            new = fixed.option
            reason = str(fixed.source)
            is_setting = True
        elif self._config.allows(old) or old == job:
            return None
        else:
            new = nearest_option(old, can_run)
            reason = "--snip-formats"
            is_setting = True
        return None if new == old else Replacement(name, old, new, reason, is_setting)

    def _untied(self, linears: Mapping[str, Option], refusals: Refusals) -> Iterator[Replacement]:
        """Yield the replacements that give tied linears one option, of the most bits."""
        for names in self._available.job.ties:
            options = dict.fromkeys(linears[name] for name in names)
            if len(options) == 1:
                continue
            finest = max(options, key=lambda option: option.bits)
            candidates = (*options, *self._available.options)
            can_run = [o for o in candidates if not any(n in refusals[o] for n in names)]
            new = nearest_option(finest, can_run)
            for name in names:
                if linears[name] != new:
                    yield Replacement(name, linears[name], new, TIED, is_setting=False)

    def problem(self, problem: PlanningProblem) -> PlanningProblem:
        """Return a former run's problem with the stages and options of this run.

        Raises:
            UsageError: if it is a problem of other linears.
        """
        if set(problem.names) != set(self._stage_and_flops):
            raise UsageError("the planning problem in the checkpoint is that of another model")
        rows = []
        for row in problem.linears:
            stage, _ = self._stage_and_flops[row.name]
            rows.append(row.model_copy(update={"stage": stage}))
        problem = problem.model_copy(update={"linears": tuple(rows)})
        options = dict.fromkeys(parse_option(name) for row in rows for name in row.options)
        refusals = self._model.refusals_of(options)
        problem = problem.with_options(self._allowed)
        return replace(self._available, refusals=refusals).restrict(problem)

    def _allowed(self, row: LinearChoices) -> dict[str, OptionCost]:
        """Return the options of a linear that the formats allow, or to which a linear is fixed.

        One that no backward reached has what the job itself runs, also if the formats lack it.
        """
        allowed = {}
        for text, cost in row.options.items():
            option = parse_option(text)
            if self._config.allows(option) or option in self._fixed_options:
                allowed[text] = cost
        job = str(self._available.job.options[row.name])
        if job in row.options and all(cost.quality_loss is None for cost in allowed.values()):
            allowed[job] = row.options[job]
        return allowed

    def pending(self, pending: PendingProblem, num_done: int) -> PendingProblem:
        """Return a stopped run's pending problem as this run solves it.

        Args:
            pending: the problem that was being solved.
            num_done: iterations that are done; the plan is due after them, and not later than
                this run's lag allows.

        Raises:
            UsageError: if it is a problem of other linears.
        """
        apply_at = min(pending.apply_at, pending.iteration + self._config.lag)
        problem = self.problem(pending.problem)
        return PendingProblem(pending.iteration, max(apply_at, num_done + 1), problem)


def describe(replaced: Sequence[Replacement], num_linears: int) -> list[str]:
    """Return one text for each kind of replacement, with the number of linears."""
    texts = []
    settings = Counter((each.new, each.reason) for each in replaced if each.is_setting)
    for (new, flag), count in settings.items():
        verb = "raised" if flag == "--snip-formats" else "set"
        texts.append(f"{count} of {num_linears} linears {verb} to {new}: {flag}")
    refused: dict[tuple[Option, Option], dict[str, str]] = {}
    for each in replaced:
        if not each.is_setting:
            refused.setdefault((each.old, each.new), {})[each.linear] = each.reason
    for (old, new), why in refused.items():
        texts.append(
            f"{len(why)} of {num_linears} linears run {new} instead of {old}: {reasons(why)}"
        )
    return texts
