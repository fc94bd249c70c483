"""How a rank's failure reaches the front process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_snip.errors import SnipError, UsageError
from megatron_snip.trainer import launch
from megatron_snip.trainer.failure import read_failure, write_failure


def test_a_failure_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    assert not write_failure("usage", "nowhere to write")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert write_failure("usage", "bad size")
    failure = read_failure(str(file))
    assert failure is not None
    assert (failure.kind, failure.text) == ("usage", "bad size")


def test_the_launcher_itself_reads_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    write_failure("crash", "Traceback ...")
    read: Any = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file)).message
    assert read["message"] == "Traceback ..."


@pytest.mark.parametrize("content", ["", "{}", '{"kind": "odd", "text": "", "time": 1}', "[1]"])
def test_what_cannot_be_read_is_no_failure(tmp_path: Path, content: str) -> None:
    (tmp_path / "error.json").write_text(content)
    assert read_failure(str(tmp_path / "error.json")) is None
    assert read_failure(str(tmp_path / "missing.json")) is None


def child_failed(tmp_path: Path, *failures: tuple[str, str, float]) -> Any:
    """A ChildFailedError with one rank a failure (kind, text, time)."""
    ranks = {}
    for rank, (kind, text, time) in enumerate(failures):
        file = tmp_path / f"{rank}.json"
        file.write_text(f'{{"kind": "{kind}", "text": "{text}", "time": {time}}}')
        ranks[rank] = SimpleNamespace(error_file=str(file), exitcode=1)
    return SimpleNamespace(failures=ranks)


def test_the_first_failure_is_the_one_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late, early = ("crash", "connection closed", 2.5), ("crash", "the reason", 2.25)
    assert launch._explain(child_failed(tmp_path, late, early)) == 1
    said = capsys.readouterr().err
    assert "the reason" in said and "connection closed" not in said
    with pytest.raises(UsageError, match="bad size"):
        launch._explain(child_failed(tmp_path, late, ("usage", "bad size", 1.0)))
    with pytest.raises(SnipError, match="disk full"):
        launch._explain(child_failed(tmp_path, ("error", "disk full", 1.0)))


def test_a_rank_that_died_without_a_word_is_told_by_its_signal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    died = SimpleNamespace(error_file="<N/A>", exitcode=-9, signal_name=lambda: "SIGKILL")
    assert launch._explain(SimpleNamespace(failures={1: died})) == 1
    assert "rank 1 ended by SIGKILL" in capsys.readouterr().err
