"""A failure that training survives keeps its traceback, once, with rank and iteration."""

import errno
import logging
from functools import partial
from typing import Any

import pytest

from megatron_snip.collectives import Control, RemoteFailure
from megatron_snip.errors import PlanningError
from megatron_snip.log import forget_warnings, set_iteration, warn_once_per_job
from megatron_snip.reporting.events import Event, Metrics, Reporter
from megatron_snip.statistics.rank_sums import RankSums
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Topology


@pytest.fixture(autouse=True)
def _new_job(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings()
    monkeypatch.setenv("RANK", "37")
    set_iteration(200)


def fail() -> None:
    raise KeyError("decoder.layers.5")


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return (message, function that raised) of every record with a traceback."""
    found = []
    for record in caplog.records:
        if record.exc_info is not None:
            assert record.levelno == logging.ERROR
            traceback: Any = record.exc_info[2]
            while traceback.tb_next is not None:
                traceback = traceback.tb_next
            found.append((record.getMessage(), traceback.tb_frame.f_code.co_name))
    return found


def test_an_attempt_logs_its_traceback_on_the_rank_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(3):  # every refresh fails in the same way: once is enough
        with pytest.raises(RemoteFailure, match="measuring failed on rank 0: KeyError"):
            Control().attempt("measuring", fail)
    line = "snip: rank 37, iteration 200: measuring failed: KeyError: 'decoder.layers.5'"
    assert tracebacks(caplog) == [(line, "fail")]


def test_a_failure_whose_text_differs_each_time_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An out-of-memory error names bytes, which differ between refreshes and linears."""

    def allocate(size: int) -> None:
        raise MemoryError(f"cannot allocate {size} bytes")

    for size in range(3):
        with pytest.raises(RemoteFailure, match=f"failed on rank 0: .* {size} bytes"):
            Control().attempt("measuring", partial(allocate, size))
        sums = RankSums(MeasureSettings({}, 1, 0), Topology())
        try:
            allocate(size)
        except MemoryError as error:
            sums.record_failure(error, f"decoder.{size}: ")
    assert len(tracebacks(caplog)) == 1
    with pytest.raises(RemoteFailure):  # another place in the code may be another bug
        Control().attempt("measuring", lambda: [][0])
    with pytest.raises(RemoteFailure):
        Control().attempt("planning", partial(allocate, 1))
    assert len(tracebacks(caplog)) == 3


def test_errors_made_for_users_have_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise PlanningError("no plan reaches the target")

    with pytest.raises(RemoteFailure):
        Control().attempt("planning", refuse)
    assert tracebacks(caplog) == []


def test_a_linear_that_cannot_be_measured_is_named(caplog: pytest.LogCaptureFixture) -> None:
    sums = RankSums(MeasureSettings({}, 1, 0), Topology())
    for name in ("decoder.a", "decoder.b"):  # the first failure counts
        try:
            fail()
        except KeyError as error:
            sums.record_failure(error, f"{name}: ")
    ((line, where),) = tracebacks(caplog)
    assert where == "fail" and "measuring decoder.a failed: KeyError" in line
    assert sums.failure == "decoder.a: KeyError: 'decoder.layers.5'"


def test_a_writer_that_fails_is_logged_in_full(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def write(self, event: Event) -> None:
            fail()

        def close(self) -> None:
            pass

    reporter = Reporter([Broken()])
    for iteration in (1, 2):
        reporter.write(Event(iteration, Metrics({})))
    assert [where for _, where in tracebacks(caplog)] == ["fail"]
    assert "Broken failed: KeyError: 'decoder.layers.5'" in caplog.text


@pytest.mark.parametrize(
    ("errors", "line"),
    [
        ([OSError(errno.ENOSPC, "No space left")] * 2, "OSError: [Errno 28] No space left"),
        (
            [OSError(errno.ENOSPC, "No space left", name) for name in ("a.png", "b.png")],
            "OSError: [Errno 28] No space left: 'a.png'",
        ),
        (
            [PermissionError("set WANDB_DATA_DIR")] * 2,
            "PermissionError: set WANDB_DATA_DIR",
        ),
    ],
)
def test_a_folder_that_takes_nothing_is_one_line(
    caplog: pytest.LogCaptureFixture, errors: list[OSError], line: str
) -> None:
    def fails(error: OSError) -> None:
        raise error

    for error in errors:
        with pytest.raises(RemoteFailure):
            Control().attempt("writing", partial(fails, error))
    assert tracebacks(caplog) == []
    assert f"writing failed: {line}" in caplog.text
    assert caplog.text.count("writing failed") == 1


@pytest.mark.parametrize(
    ("variables", "num_lines"),
    [
        ({"RANK": "0"}, 1),
        ({"RANK": "1"}, 0),
        ({"SLURM_PROCID": "0"}, 1),
        ({"SLURM_PROCID": "3"}, 0),
    ],
)
def test_what_every_rank_finds_is_logged_by_the_first(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    num_lines: int,
) -> None:
    """srun sets no RANK."""
    monkeypatch.delenv("RANK")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    warn_once_per_job(logging.getLogger("megatron_snip"), "found")
    assert len(caplog.records) == num_lines
