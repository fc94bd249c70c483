"""Transformer Engine's linears under plans, where it is installed: tests marked `real_te`.

    python -m benchmarks.te [--json FILE]

Among them `test_te_on_a_gpu.py`, which also measures: time and memory of a layer of Llama-7B's
width under bf16 and fp8 plans.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.machine import has_gpu, write_result


def run() -> dict[str, Any]:
    """Return what the tests measured, and what failed."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as file:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "real_te"]
        words += ["tests/te", f"--junitxml={file.name}"]
        status = subprocess.run(words, env={**os.environ, "SNIP_TE_REAL": "1"}, check=False)
        cases = list(ElementTree.parse(file.name).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    failures = {c.attrib["name"]: "see above" for c in failed}
    if status.returncode and not failures:
        failures["pytest"] = f"exit status {status.returncode}"
    measured = {
        p.attrib["name"]: float(p.attrib["value"]) for c in cases for p in c.iter("property")
    }
    return {"tests": len(cases), "measured": measured, "failures": failures}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    report: dict[str, Any] = {"skipped": "no Transformer Engine on a GPU; launch/te.sh brings it"}
    if has_gpu() and importlib.util.find_spec("transformer_engine"):
        report = run()
    if args.json:
        write_result(args.json, report)
    print(report)
    return int(bool(report.get("failures")))


if __name__ == "__main__":
    raise SystemExit(main())
