"""Tests that a GPU has to pass, run there: bits of the kernels, Transformer Engine under plans.

python -m benchmarks.suites bits|te [--json FILE]

bits    tests/unit/kernels: each kernel against its PyTorch reference, bit for bit
te      the tests marked `real_te`; test_te_on_a_gpu.py also measures time and memory of a layer
        of Llama-7B's width under bf16 and fp8 plans
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.machine import has_gpu, write_result


@dataclass(frozen=True)
class Suite:
    """Some tests.

    Attributes:
        arguments: of pytest.
        environment: variables that the tests read.
        needs: packages without which they are skipped.
        missing: where to get these.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ("pytest",)
    missing: str = "pip install pytest"


SUITES = {
    "bits": Suite(
        # The other two compile for other GPUs, and run all of it in Triton's interpreter.
        (
            "tests/unit/kernels",
            "--ignore=tests/unit/kernels/test_compilation.py",
            "--ignore=tests/unit/kernels/test_choose.py",
        ),
        needs=("pytest", "triton"),
        missing="pip install pytest triton",
    ),
    "te": Suite(
        ("-m", "real_te", "tests/te"),
        {"SNIP_TE_REAL": "1"},
        ("pytest", "transformer_engine"),
        "launch/te.sh brings Transformer Engine",
    ),
}


def run(suite: Suite) -> dict[str, Any]:
    """Return how many tests ran, what they measured, and which failed."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as file:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        words += [*suite.arguments, f"--junitxml={file.name}"]
        status = subprocess.run(words, env={**os.environ, **suite.environment}, check=False)
        cases = list(ElementTree.parse(file.name).iter("testcase"))
    skipped = [c for c in cases if c.find("skipped") is not None]
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    failures = {c.attrib["name"]: "see above" for c in failed}
    if status.returncode and not failures:
        failures["pytest"] = f"exit status {status.returncode}"
    measured = {
        p.attrib["name"]: float(p.attrib["value"]) for c in cases for p in c.iter("property")
    }
    ran = len(cases) - len(skipped)
    return {"tests": ran, "skips": len(skipped), "measured": measured, "failures": failures}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("suite", choices=tuple(SUITES))
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    suite = SUITES[args.suite]
    lacking = [name for name in suite.needs if not importlib.util.find_spec(name)]
    if not has_gpu():
        report: dict[str, Any] = {"skipped": "no GPU"}
    elif lacking:
        report = {"skipped": f"no {', '.join(lacking)}; {suite.missing}"}
    else:
        report = run(suite)
    if args.json:
        write_result(args.json, report)
    print(report)
    return int(bool(report.get("failures")))


if __name__ == "__main__":
    raise SystemExit(main())
