"""Runs the tests of Transformer Engine's linears in a process that finds its own Python.

Megatron decides at import whether there is a Transformer Engine, so no process can have both.
"""

import os
from unittest import mock

from tests.processes import ROOT, run_python

OVERRIDDEN = ("tests/te/test_te_backward_override.py",)
ALL = ("tests/te", "tests/te_on_cpu")
RUNS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "fast": ((*ALL, "-m", "not slow"), {}),
    "slow": ((*ALL, "-m", "slow"), {}),
    "high-precision backward": (OVERRIDDEN, {"NVTE_BACKWARD_OVERRIDE": "high_precision"}),
    "dequantized backward": (OVERRIDDEN, {"NVTE_BACKWARD_OVERRIDE": "dequantized"}),
}
"""Files or folders of tests, and the environment that Transformer Engine reads at import."""
FAST = ("fast", "high-precision backward")

ENVIRONMENT = {
    "SNIP_TE_ON_CPU": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTEST_ADDOPTS": "",
}
TIME_LIMIT_S = 3000


def run(name: str) -> None:
    """Run one of `RUNS`; fails if a test of it does, with its output."""
    tests, environment = RUNS[name]
    outside = {name: value for name, value in os.environ.items() if "PYTEST_XDIST" not in name}
    words = ["-m", "pytest", *tests, "-q", "-p", "no:cacheprovider"]
    with mock.patch.dict(os.environ, outside, clear=True):
        done = run_python(*words, cwd=ROOT, timeout=TIME_LIMIT_S, **ENVIRONMENT, **environment)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
