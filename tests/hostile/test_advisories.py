"""An advisory that applies to a pinned version is found; others are not."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hostile.licences import LOCK
from tests.processes import run_python

TOOL = LOCK.parent / "advisories.py"
VERSION = re.findall(r"^numpy==(\S+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)[0]


def ranges(*events: tuple[str, str]) -> dict[str, Any]:
    return {"ranges": [{"type": "ECOSYSTEM", "events": [dict([event]) for event in events]}]}


@pytest.mark.parametrize(
    ("affected", "status"),
    [
        (ranges(("introduced", "0")), 1),
        (ranges(("introduced", "0"), ("fixed", VERSION)), 0),
        (ranges(("introduced", "0"), ("last_affected", VERSION)), 1),
        (ranges(("introduced", "0"), ("fixed", "1.0"), ("introduced", VERSION)), 1),
        (ranges(("introduced", "999")), 0),
        ({"versions": [VERSION]}, 1),
        (None, 2),  # no copy of the database
    ],
)
def test_an_advisory_holds_the_pinned_version_or_not(
    tmp_path: Path, affected: dict[str, Any] | None, status: int
) -> None:
    if affected is not None:
        folder = tmp_path / "vulns" / "numpy"
        folder.mkdir(parents=True)
        text = yaml.safe_dump({"id": "PYSEC-1", "affected": [affected]})
        (folder / "PYSEC-1.yaml").write_text(text)
    done = run_python(TOOL, tmp_path)
    assert done.returncode == status, done.stderr
    assert (f"numpy {VERSION}: PYSEC-1" in done.stdout) == (status == 1)
