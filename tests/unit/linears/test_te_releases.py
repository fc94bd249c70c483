"""The table of docs/backends.md: what plans run under each release of Transformer Engine.

Transformer Engine's own Python runs (tests/te_on_cpu), each release in a process of its own.
"""

import json

import pytest

from tests.processes import ROOT, run_python
from tests.te_on_cpu import RELEASES

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

pytestmark = pytest.mark.slow


def test_the_table_of_releases_is_what_runs() -> None:
    rows = []
    for release in RELEASES:
        done = run_python(
            "-m", "tests.te_on_cpu.releases", release, cwd=ROOT, timeout=600, **ENVIRONMENT
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RELEASE")]
        assert lines, done.stdout[-5000:] + done.stderr[-5000:]
        answers = json.loads(lines[0].removeprefix("RELEASE"))
        rows.append([release, *answers.values()])
    table = [["Transformer Engine", *answers], ["---"] * len(rows[0]), *rows]
    text = "".join(f"| {' | '.join(row)} |\n" for row in table)
    assert text in (ROOT / "docs" / "backends.md").read_text(), text
