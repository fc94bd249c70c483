"""Which iterations count as ordinary, and their mean time."""

from megatron_snip.run.step_times import StepTimes


def test_only_ordinary_iterations_under_the_current_plan_count() -> None:
    times = StepTimes()
    assert times.end_iteration({"step_s": 9.0, "loss": 1.0}) == {"loss": 1.0}  # of the process
    assert times.mean_s is None
    for seconds in (1.0, 3.0):
        assert times.end_iteration({"step_s": seconds}) == {"step_s": seconds}
    assert times.end_iteration({"loss": 1.0}) == {"loss": 1.0}  # its time is not known
    times.leave_out()  # measured, for example
    assert times.end_iteration({"step_s": 9.0}) == {}
    assert times.mean_s == 2.0
    times.start_plan()
    assert times.mean_s is None
    assert times.end_iteration({"step_s": 9.0}) == {}
    times.end_iteration({"step_s": 5.0})
    assert times.mean_s == 5.0
