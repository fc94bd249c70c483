"""Runs the kernels' tests in Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).with_name("test_bits.py")


@pytest.mark.slow
def test_kernels_agree_with_the_reference_in_the_interpreter():
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("this process interprets already")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(
        command,
        env=environment,
        cwd=TESTS.parents[3],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
