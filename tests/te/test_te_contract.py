"""Quantizers and quantized weights live as long as the record of a real build says."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python
from tests.te.contract import histories

RECORD = json.loads(Path(__file__).with_name("contract.json").read_text())
REAL = os.environ.get("SNIP_TE_REAL") == "1"


def real() -> Any:
    """Run tests/te/contract.py in a process that has no GPU, and finds what this one finds."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = run_python("-m", "tests.te.contract", CUDA_VISIBLE_DEVICES="", PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.real_te
def test_quantizers_and_cached_weights_live_as_long() -> None:
    found = real() if REAL else {**RECORD, "histories": histories()}
    if found["version"] != RECORD["version"]:
        pytest.skip(f"installed is {found['version']}, recorded {RECORD['version']}")
    for name, history in found["histories"].items():
        assert history == RECORD["histories"][name], name
