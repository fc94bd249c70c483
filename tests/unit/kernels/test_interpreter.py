"""Runs the kernels' tests in Triton's interpreter, in a process of their own."""

import os
from pathlib import Path

import pytest

from tests.processes import ROOT, run_python

pytest.importorskip("triton")

TESTS = Path(__file__).with_name("test_bits.py")


@pytest.mark.slow
def test_kernels_agree_with_the_reference_in_the_interpreter():
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("this process interprets already")
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", TESTS]
    done = run_python(*words, cwd=ROOT, timeout=280, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
