"""An advisory that applies to a pinned version is found; others are not."""

import re
from pathlib import Path

import pytest
import yaml

from tests.hostile.licences import LOCK
from tests.processes import run_python

TOOL = LOCK.parent / "advisories.py"
NAME = "numpy"
VERSION = re.findall(rf"^{NAME}==(\S+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)[0]

RANGES = [
    ([{"introduced": "0"}], True),
    ([{"introduced": "0"}, {"fixed": VERSION}], False),
    ([{"introduced": "0"}, {"last_affected": VERSION}], True),
    ([{"introduced": "0"}, {"fixed": "1.0"}, {"introduced": VERSION}], True),
    ([{"introduced": "999"}], False),
]


def write(database: Path, affected: dict[str, object]) -> None:
    folder = database / "vulns" / NAME
    folder.mkdir(parents=True)
    text = yaml.safe_dump({"id": "PYSEC-1", "affected": [affected]})
    (folder / "PYSEC-1.yaml").write_text(text)


@pytest.mark.parametrize(("events", "hit"), RANGES)
def test_a_range_holds_the_pinned_version_or_not(
    tmp_path: Path, events: list[dict[str, str]], hit: bool
) -> None:
    write(tmp_path, {"ranges": [{"type": "ECOSYSTEM", "events": events}]})
    done = run_python(TOOL, tmp_path)
    assert done.returncode == int(hit), done.stderr
    assert (f"{NAME} {VERSION}: PYSEC-1" in done.stdout) == hit


def test_a_listed_version_is_found_and_what_is_no_copy_is_refused(tmp_path: Path) -> None:
    assert run_python(TOOL, tmp_path).returncode == 2
    write(tmp_path, {"versions": [VERSION]})
    assert run_python(TOOL, tmp_path).returncode == 1
