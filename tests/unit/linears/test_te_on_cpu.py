"""The tests that run Transformer Engine's own Python, in a process that finds it.

Megatron decides at import whether there is a Transformer Engine, so this process cannot have both.
"""

import os

import pytest

from tests.processes import ROOT, run_python

ENVIRONMENT = {
    "SNIP_TE_ON_CPU": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTEST_ADDOPTS": "",
}
TIME_LIMIT_S = 3000


@pytest.mark.timeout(TIME_LIMIT_S + 20)
@pytest.mark.parametrize(
    ("tests", "environment"),
    [
        (("tests/te", "tests/te_on_cpu"), {}),
        *(
            (("tests/te/test_te_backward_override.py",), {"NVTE_BACKWARD_OVERRIDE": value})
            for value in ("high_precision", "dequantized")
        ),
    ],
    ids=["all", "high-precision backward", "dequantized backward"],
)
def test_transformer_engine_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tests: tuple[str, ...], environment: dict[str, str]
) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)
    words = ["-m", "pytest", *tests, "-q", "-p", "no:cacheprovider"]
    done = run_python(*words, cwd=ROOT, timeout=TIME_LIMIT_S, **ENVIRONMENT, **environment)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
