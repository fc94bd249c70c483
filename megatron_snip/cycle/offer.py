"""Offer: what this model's linears may be given on these machines, and plans made from that alone.

Options that nobody here can run are not offered; problems list what each linear can run; a plan
from elsewhere is checked against the model and brought to what can run, never silently.
"""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality import unmeasured_problem_dict
from megatron_snip.formats import lowest_precision
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.runnable import nearest, offered, restricted, told_changes
from megatron_snip.options import BF16, Option
from megatron_snip.planning.assigned import Work, assigned_plan
from megatron_snip.planning.plan import PrecisionPlan, read_plan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.policies import get_policy
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings

if TYPE_CHECKING:
    from megatron_snip.refresh import Schedule

logger = logging.getLogger(__name__)


class Offer:
    """What the linears of one model may choose from.

    Attributes:
        options: on offer, in the settings' order; the same on all ranks.
    """

    def __init__(self, config: SnipConfig, model: PlannedModel, seed: int, leader: bool) -> None:
        """All ranks: find out what can run; rank 0 warns of what cannot.

        Raises:
            UnsupportedError: on every rank, if no linear can run the lowest precision.
        """
        self._config = config
        self._model = model
        self._seed = seed
        self._leader = leader
        self._names = [linear.name for linear in model.all_linears]
        self.options = self._offered()

    @property
    def lowest_format(self) -> str:
        """What quality losses are relative to: of the formats that can run, the lowest precision.

        Another one of as few bits stands in for a lowest precision that no linear can run.
        """
        on_offer = {name for option in self.options for name in option.formats}
        return lowest_precision(tuple(n for n in self._config.formats if n in on_offer)).name

    def first_plan(self, schedule: Schedule, resumed: PrecisionPlan | None) -> PrecisionPlan:
        """Rank 0: the plan file, a policy that needs no statistics, or `initial_option`.

        A resumed run goes on with its plan, unless the plan file is to be kept or the policy
        makes its plan from nothing but settings. Rules that no plan can satisfy are found here
        and not at the first refresh.

        Raises:
            UsageError: if the policy is unknown, or a pin or the plan file does not fit the model.
            InfeasiblePlanError: if no plan reaches the target.
        """
        get_policy(self._config.policy)
        settings = PlanSettings.from_config(self._config, self._seed)
        problem = PlanningProblem.from_dict(self._unmeasured())
        if schedule.replans:
            make_plan(problem, settings.model_copy(update={"policy": "greedy"}))
        keeps_file = self._config.plan_file is not None and self._config.collect_only
        if resumed is not None and not (schedule.static or keeps_file):
            return self.checked(resumed)
        if self._config.plan_file is not None:
            return self.checked(read_plan(self._config.plan_file))
        if self._config.collect_only or not schedule.static:
            initial = {"policy": "uniform-bf16", "max_changes": None}
            settings = settings.model_copy(update=initial)
        return make_plan(problem, settings)

    def safe_plan(self, plan: PrecisionPlan, step: int) -> PrecisionPlan:
        """Return `plan` in BF16 throughout, but for pinned linears."""
        globs = [glob for glob, _ in self._config.pin_pairs]
        linears = {
            name: option if any(fnmatchcase(name, glob) for glob in globs) else BF16
            for name, option in plan.linears.items()
        }
        return self._assigned(linears, "guard", step)

    def checked(self, plan: PrecisionPlan) -> PrecisionPlan:
        """Return `plan` if it is one of this model.

        Raises:
            UsageError: naming the linears that are missing or unknown.
        """
        plan.check_against(self._names)
        return plan

    def runnable(self, plan: PrecisionPlan) -> PrecisionPlan:
        """All ranks: bring a plan from elsewhere to what can run here; rank 0 says what changed."""
        runnable = self._model.runnable
        runnable.learn((*plan.linears.values(), *self.options))
        linears = nearest(runnable, plan.linears, self.options)
        whose = plan.label
        foreign = [o for o in dict.fromkeys(linears.values()) if o not in self.options]
        for text in self._model.approximations(foreign):  # of those on offer it has been said
            self._warn(f"{whose}: {text}")
        if linears == plan.linears:
            return plan
        for text in told_changes(runnable, plan.linears, linears):
            self._warn(f"{whose}: {text}")
        return self._assigned(linears, plan.policy, plan.step)

    def restricted(self, problem: dict[str, Any]) -> dict[str, Any]:
        """Return the problem with what every linear can run; in full where nothing will run it."""
        if self._config.collect_only and self._config.plan_file is None:
            return problem
        return restricted(self._model.runnable, problem)

    def placed(self, problem: dict[str, Any]) -> dict[str, Any] | None:
        """All ranks: return a former run's problem with this layout's stages and what runs here.

        None if it is of another model.
        """
        stages = {linear.name: linear.stage for linear in self._model.all_linears}
        rows = problem["linears"]
        if {row["name"] for row in rows} != set(stages):
            return None
        moved = [{**row, "stage": stages[row["name"]]} for row in rows]
        options = (Option.parse(text) for row in moved for text in row["options"])
        self._model.runnable.learn(options)
        return self.restricted({**problem, "linears": moved})

    def _warn(self, text: str) -> None:
        if self._leader:
            logger.warning("snip: %s", text)

    def _offered(self) -> tuple[Option, ...]:
        c, runnable = self._config, self._model.runnable
        if c.collect_only and c.plan_file is None:  # measure also what other machines can run
            return c.options
        runnable.learn((*c.options, Option.uniform(c.lowest_format)))
        options, warnings = offered(runnable, c.options, self._names, c.lowest_format)
        for text in warnings:
            self._warn(text)
        if self._leader:
            for text in self._model.approximations(options):
                logger.info("snip: %s", text)
        return options

    def _unmeasured(self) -> dict[str, Any]:
        c, linears = self._config, self._model.all_linears
        return self.restricted(
            unmeasured_problem_dict(linears, self.options, c.lowest_format, c.efficiency_target)
        )

    def _assigned(self, linears: dict[str, Option], policy: str, step: int) -> PrecisionPlan:
        work = [Work(i.name, i.stage, i.flops_per_token) for i in self._model.all_linears]
        return assigned_plan(linears, work, self._config.lowest_format, policy, step)
