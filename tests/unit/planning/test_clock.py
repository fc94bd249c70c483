import time

from megatron_snip.planning.clock import Deadline


def test_time_runs_out_and_stays_at_zero() -> None:
    deadline = Deadline(0.01)
    assert deadline.elapsed() >= 0.0
    assert deadline.left() <= 0.01
    time.sleep(0.02)
    assert deadline.left() == 0.0
    assert deadline.elapsed() >= 0.02
