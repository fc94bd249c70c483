"""The code of docs/extending.md works as it stands there."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.formats import FORMATS
from megatron_snip.planning.policies import POLICIES
from tests.processes import ROOT
from tests.unit.reporting.runs import Shape, config, write_run

TEXT = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run to plan for, and tables that are put back."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "demo", Shape(config(start_step=21), iterations=24))
    tables: list[dict[str, Any]] = [FORMATS, POLICIES]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


# The last one has a model and runs on ranks, in tests/distributed/test_controller.py.
@pytest.mark.parametrize(("title", "body"), SECTIONS[:3], ids=[title for title, _ in SECTIONS[:3]])
def test_a_section_runs_from_top_to_bottom(title: str, body: str) -> None:
    code = re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
    assert len(code) >= 2 and len(SECTIONS) == 4
    scope: dict[str, Any] = {"__name__": "extending"}
    for block in code:
        exec(compile(block, f"extending.md, {title}", "exec"), scope)
