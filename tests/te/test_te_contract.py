"""The stand-in has what Transformer Engine has: the recorded one, or the one that is installed.

Without a stand-in the installed one is compared with both.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, run_python

RECORD = json.loads(Path(__file__).with_name("contract.json").read_text())
REAL = os.environ.get("SNIP_TE_REAL") == "1"
STAND_INS = str(ROOT / "tests" / "stand_ins")
OWN = {"num_builds", "seen"}
"""Attributes that only the stand-in has."""


def contract(*first: str) -> Any:
    """Run tests/te/contract.py in a process that has no GPU."""
    path = os.pathsep.join([*first, str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = run_python("-m", "tests.te.contract", PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ours() -> Any:
    return contract(STAND_INS)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return contract() if REAL else RECORD


@pytest.mark.real_te
def test_the_record_is_what_is_installed(theirs: Any) -> None:
    if theirs["version"] != RECORD["version"]:
        pytest.skip(f"installed is {theirs['version']}, recorded {RECORD['version']}")
    assert theirs == RECORD


@pytest.mark.real_te
def test_signatures_agree(ours: Any, theirs: Any) -> None:
    """The stand-in's parameters are there, with their defaults, and no other must be given."""
    for name, mine in ours["signatures"].items():
        mine, other = (text.split(", ") for text in (mine, theirs["signatures"][name]))
        if mine != [""]:  # not stood in for
            assert set(mine) <= set(other), name
            assert [p for p in mine if "=" not in p] == [p for p in other if "=" not in p], name


@pytest.mark.real_te
def test_modules_have_the_same_parameters_and_no_other_attributes(ours: Any, theirs: Any) -> None:
    for name, mine in ours["attributes"].items():
        other = theirs["attributes"][name]
        assert mine == other if ":" in mine else set(mine.split()) - OWN <= set(other.split()), name


@pytest.mark.real_te
def test_quantizers_and_cached_weights_live_as_long(ours: Any, theirs: Any) -> None:
    for name, mine in ours["histories"].items():
        assert mine == theirs["histories"][name], name
