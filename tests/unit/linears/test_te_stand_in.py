"""The tests of Transformer Engine's linears, in a process that finds the stand-in of it.

Megatron decides at import whether there is a Transformer Engine, so this process cannot have both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "SNIP_TE_STAND_IN": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTEST_ADDOPTS": "",
}
TIME_LIMIT_S = 240


@pytest.mark.timeout(TIME_LIMIT_S + 20)
def test_transformer_engine_s_linears_on_its_stand_in() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/te", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    assert " passed" in done.stdout
