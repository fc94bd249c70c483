"""`make -n` prints what a target would do, and does none of it."""

import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT


@pytest.mark.parametrize("tier", ["megatron", "bridge"])
def test_a_dry_run_runs_no_test(tier: str, tmp_path: Path) -> None:
    """Make runs recipe lines that call make, also under -n."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    python.chmod(0o755)
    venv = f"{tier.upper()}_VENV={tmp_path}"
    words = ["make", "-n", f"test-{tier}", venv, f"MEGATRON_PYTHON={python}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"{python} -m pytest tests/{tier}" in done.stdout
    assert not (tmp_path / "ran").exists()
