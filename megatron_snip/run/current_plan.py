"""CurrentPlan: the plan that the linears run, and how long iterations take under it."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_snip.collectives import RemoteFailure
from megatron_snip.errors import SnipError
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import BF16
from megatron_snip.planning.plan import PrecisionPlan, changed_linears, format_shares
from megatron_snip.reporting.events import Event, PlanApplied, Reporter
from megatron_snip.run.plans import RunPlans
from megatron_snip.run.step_times import StepTimes


class CurrentPlan:
    """The plan that the linears run; all ranks have the same and call every method together.

    Attributes:
        plan: the plan.
        history: (iteration, digest) of every plan that followed the run's first one, in order.
        step_times: seconds of ordinary iterations under the plan.
    """

    def __init__(
        self, plan: PrecisionPlan, model: PlannedModel, plans: RunPlans, reporter: Reporter
    ) -> None:
        """Note a run's first plan; the linears run it from `start` on.

        Args:
            plan: the first plan.
            model: the planned linears.
            plans: the options of the run's plans.
            reporter: gets every new plan, and why a plan stays.
        """
        self.plan = plan
        self.history: list[tuple[int, str]] = []
        self.step_times = StepTimes()
        self._model = model
        self._plans = plans
        self._reporter = reporter

    @property
    def format_shares(self) -> dict[str, float]:
        """Share of the linears' FLOPs in each format."""
        return format_shares(self.plan.linears, self._plans.stage_and_flops)

    def start(self, former: PrecisionPlan | None, num_done: int, may_change: bool) -> None:
        """All ranks: let the linears run the first plan; report it if a reader needs to know it.

        Args:
            former: the last plan of the stopped run; None in a new run.
            num_done: iterations that the weights were trained for.
            may_change: whether other plans may follow.
        """
        self._model.apply(self.plan.linears)
        # A new run's changes are counted from what the job itself runs.
        job = self._plans.available.job.options
        before = job if former is None else former.linears
        num_changed = 0
        for name, option in self.plan.linears.items():
            num_changed += option != before.get(name, job[name])
        is_resumed = former is not None and former.digest == self.plan.digest
        if former is not None and not is_resumed:
            self.history.append((num_done + 1, self.plan.digest))
        # A first plan that changes nothing is not reported if others follow. A report shows a run
        # without a plan as BF16, so a new run that starts with another precision reports it.
        starts_in_bf16 = set(self.plan.linears.values()) == {BF16}
        changes_nothing_yet = not num_changed and may_change
        needs_no_report = changes_nothing_yet and (former is not None or starts_in_bf16)
        if self.history or not needs_no_report:
            self._report(num_done + 1, num_changed, is_resumed=is_resumed)

    @contextmanager
    def kept_on_error(self, iteration: int) -> Iterator[None]:
        """All ranks: on a SnipError, which all ranks get, keep the plan and report it."""
        try:
            yield
        except SnipError as failure:
            text = f"keeping {self.plan.label}: {failure}"
            self._reporter.notify(iteration, "refresh_failed", text)

    def change(
        self,
        iteration: int,
        plan: PrecisionPlan,
        waited_s: float = 0.0,
        saving_s: float | None = None,
    ) -> PlanApplied:
        """All ranks: let the linears run a plan, which is the current one from then on; report it.

        Args:
            iteration: the first iteration under the plan.
            plan: the plan.
            waited_s: seconds that training waited for it.
            saving_s: seconds that it saves in each step against BF16; None if not known.

        Returns:
            What was reported.

        Raises:
            RemoteFailure: on every rank, if a linear of one rank refuses. Then all linears run as
                before, and the plan stays.
        """
        control = self._model.runtime.topology.control
        try:
            control.attempt("applying the plan", lambda: self._model.apply(plan.linears))
        except RemoteFailure:
            self._model.apply(self.plan.linears)
            raise
        num_changed = len(changed_linears(self.plan, plan))
        self.plan = plan
        self.history.append((iteration, plan.digest))
        return self._report(iteration, num_changed, waited_s=waited_s, saving_s=saving_s)

    def _report(
        self,
        iteration: int,
        num_changed: int,
        *,
        is_resumed: bool = False,
        waited_s: float = 0.0,
        saving_s: float | None = None,
    ) -> PlanApplied:
        """All ranks: report the plan, and what every linear runs under it.

        Args:
            iteration: the first iteration under the plan.
            num_changed: how many linears run another option than before.
            is_resumed: whether a stopped run had the same plan.
            waited_s: as in `change`.
            saving_s: as in `change`.
        """
        applied = PlanApplied(
            self.plan,
            self.format_shares,
            num_changed,
            waited_s=waited_s,
            resumed=is_resumed,
            resolved=self._model.resolved(self.plan, iteration, self._plans.available.fixed),
            saving_s=saving_s,
        )
        self._reporter.write(Event(iteration, applied))
        self.step_times.start_plan()
        return applied
