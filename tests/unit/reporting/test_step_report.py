"""One report a step: in order, at the right index, nothing after the end."""

from megatron_snip.reporting.reporter import Applied, Event
from megatron_snip.reporting.step_report import StepReport, StepReporter
from tests.unit.reporting.runs import Shape, config, plan_from, refresh_at, tell

SHAPE = Shape(config())


class Writer:
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def write(self, report: StepReport) -> None:
        self.reports.append(report)


def test_each_step_is_one_report_with_all_that_happened_in_it() -> None:
    writer = Writer()
    tell(StepReporter([writer]), SHAPE)
    reports = writer.reports
    assert [report.index for report in reports] == list(range(24))
    assert [r.index for r in reports if r.refresh is not None] == [2, 10, 18]
    assert [r.index for r in reports if r.applied is not None] == [4, 12, 20]
    assert all("snip/training/loss" in report.scalars for report in reports)


def test_between_logged_steps_only_news_is_told() -> None:
    writer = Writer()
    tell(StepReporter([writer], offset=1, interval=10), SHAPE)
    # Indices are 1-based here: refreshes 3, 11, 19; plans 5, 13, 21; the interval's 10, 20.
    assert [report.index for report in writer.reports] == [3, 5, 10, 11, 13, 19, 20, 21]


def test_a_resumed_run_goes_on_at_its_own_steps() -> None:
    writer = Writer()
    reporter = StepReporter([writer])
    refresh = refresh_at(SHAPE, 0)
    reporter.planned(Applied(plan_from(SHAPE, refresh), 0, 3, 0.0))  # of before the stop
    reporter.metrics(17, {"loss": 2.0})
    (report,) = writer.reports
    assert report.index == 17 and report.applied is not None


def test_news_of_a_step_that_never_ended_is_told_at_the_end_and_in_order() -> None:
    writer = Writer()
    reporter = StepReporter([writer])
    reporter.metrics(8, {"loss": 2.0})
    reporter.event(Event(9, "guard", "the loss is NaN"))
    reporter.close()
    assert [report.index for report in writer.reports] == [8, 9]
    assert writer.reports[1].events[0].message == "the loss is NaN"


def test_nothing_is_told_after_the_end() -> None:
    writer = Writer()
    reporter = StepReporter([writer])
    reporter.close()
    reporter.event(Event(1, "kept", "late"))
    reporter.metrics(1, {"loss": 2.0})
    reporter.close()
    assert writer.reports == []


def test_metrics_that_somebody_else_logs_are_left_out() -> None:
    writer = Writer()
    StepReporter([writer], leave_out=["loss"]).metrics(1, {"loss": 2.0, "lr": 0.1})
    assert "snip/training/loss" not in writer.reports[0].scalars
    assert writer.reports[0].scalars["snip/training/lr"] == 0.1
