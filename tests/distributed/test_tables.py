"""The page on tables answers its questions on a run of the trainer on two ranks."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.train_command import command, run_command
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "tables.md").read_text()
SNIP = {"enabled": True, "start_step": 11, "interval": 3, "lag": 1, "stat_decay": 0.0}


def test_the_page_of_tables_runs_on_a_real_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    words = command(tmp_path / "runs" / "demo", train_iters=19, snip=SNIP)
    done = run_command(words, tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    code = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    questions = re.findall(r"^## .+\?$", PAGE, re.MULTILINE)
    assert len(questions) == 5 == len(code) - 1
    assert all(len(block.splitlines()) <= 5 for block in code[1:])
    for block in code:
        exec(compile(block, "tables.md", "exec"), scope)
    tables, run = scope["tables"], scope["run"]
    for name, columns in re.findall(r"^\| `tables\.(\w+)\(run\)` \| .+? \| (.+) \|$", PAGE, re.M):
        found = getattr(tables, name)(run)
        assert list(found) == re.findall("`(.+?)`", columns)
        assert len({len(values) for values in found.values()}) == 1 and found != {}
    names = list(run.plan.linears)
    assert len(names) == 16
    assert len(scope["fragile"]) == 5 and set(scope["fragile"].index) <= set(names)
    assert list(scope["fragile"]) == sorted(scope["fragile"], reverse=True)
    assert list(scope["stability"]) == [11, 14, 17]
    assert all(scope["stability"].iloc[i, i] == pytest.approx(1.0) for i in range(3))
    assert set(scope["changed"].index) <= set(names)
    plans = scope["plans"]
    assert (plans["start"].iloc[0], plans["end"].iloc[-1]) == (12, 20)
    assert plans["first_loss"].iloc[0] == scope["loss"].loc[12]
    assert plans["last_loss"].iloc[-1] == scope["loss"].loc[19]
    assert len(scope["worst"]) == 5 and scope["worst"].between(0, 1).all()
    statistics = set(tables.statistics(run)["statistic"])
    assert {"input_square", "fp4.input_error_square", "fp8.grad_error_square"} <= statistics
