"""188 published recipes through preflight: its answers are those on file."""

import json
from typing import Any

import pytest

from megatron_snip.linears.te.modules import EXTENSION
from megatron_snip.patches.incompatible import check_flags
from tests.processes import ROOT, run_python
from tests.recipes import load

WRITE = """
import sys
import tests.te_on_cpu.installed
from pathlib import Path
from tests.recipes import preflight
preflight.write(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In a process of its own, which finds Transformer Engine and has other process groups."""
    path = tmp_path_factory.mktemp("preflight") / "answers.json"
    done = run_python("-c", WRITE, path, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-5000:]
    return dict(json.loads(path.read_text()))


def test_the_answers_are_those_on_file(found: dict[str, Any]) -> None:
    wanted = json.loads((ROOT / "tests" / "recipes" / "preflight.json").read_text())
    assert found.keys() == wanted.keys() and len(found) == 188
    assert {name: found[name] for name in wanted if found[name] != wanted[name]} == {}


def test_none_is_refused_and_each_plans_unless_its_flags_forbid(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    extension: Any = __import__(EXTENSION, fromlist=["HAVE_TE"])
    monkeypatch.setattr(extension, "HAVE_TE", True)
    for name, args in load():
        each = found[name]
        measures = any(row.plans == "measures" for row in check_flags(args))
        assert each["only_measures"] == measures, name
        assert not each["refused"] and len(each["formats"]) == 2, (name, each)
        if not measures:
            assert each["target"]["least"] <= each["target"]["runs"] <= each["target"]["best"], name
