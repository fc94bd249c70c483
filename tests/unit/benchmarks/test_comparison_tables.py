"""Tables of comparisons in documents say what the committed results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import comparison_tables
from benchmarks.machine import RESULTS
from megatron_snip.errors import UsageError

ROOT = Path(__file__).parents[3]
DOCUMENTS = ("README.md", "docs/comparison.md")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A comparison of three contenders over two lowest formats, one number unknown."""

    def row(name: str, gap: float, deviation: float | None) -> dict[str, object]:
        spread = {"mean": gap, "deviation": deviation, "count": 2}
        return {
            "contender": name,
            "seeds": 2,
            "lowest_fraction": 0.75,
            "validation": {"mean": 2.0 + gap, "deviation": 0.1, "count": 2},
            "gap": spread,
            "relative_gap": gap / 2,
            "training_gap": spread,
            "over_rival": spread,
            "share_of_yardstick": None,
            "diverged_steps": 0,
            "step_time": {"Hopper": 0.5},
        }

    tables = [
        {
            "title": "t",
            "mode": "forks",
            "lowest": low,
            "target": 0.75,
            "rows": [row("bf16", 0.0, 0.0), row(low, 0.04, 0.001), row("snip-gemm", 0.002, None)],
        }
        for low in ("fp4", "fp3")
    ]
    machine = {"date": "2026-01-02", "cpu": "A CPU", "cores": 3, "gpu": None}
    content = {"commit": "0123456789abcdef", "machine": machine, "tables": tables}
    (tmp_path / "compare-x.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_up_to_date(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert comparison_tables.replaced(text) == text


def test_a_full_and_a_short_table(folder: Path) -> None:
    full = comparison_tables.made("full", ["compare-x/fp3"], folder).splitlines()
    assert full[0].startswith("| policy | fp3 FLOPs | validation loss | gap | gap, % |")
    assert full[3].startswith("| fp3 | 75.0 % | 2.0400 | +40.0 +- 1.0 | 2.00 | +40.0 +- 1.0 |")
    assert full[-1] == (
        "`benchmarks/results/compare-x.json`: 2026-01-02, A CPU, 3 cores, commit 0123456789."
    )
    short = comparison_tables.made("short", ["compare-x/fp4"], folder).splitlines()
    assert short[0] == "| policy | fp4 FLOPs | gap | training gap | over snip-linear |"
    assert not any(line.startswith("| bf16") for line in short)
    assert short[3] == "| snip-gemm | 75.0 % | +2.0 | +2.0 | +2.0 |"


def test_gaps_of_several_comparisons_share_rows(folder: Path) -> None:
    lines = comparison_tables.made("gaps", ["compare-x/fp4", "compare-x/fp3"], folder).splitlines()
    assert lines[0] == "| policy | E2M1 (`fp4`), 2 seeds | stress format (`fp3`), 2 seeds |"
    assert lines[2:4] == [
        "| the column's format everywhere | 40.0 +- 1.0 | 40.0 +- 1.0 |",
        "| **SNIP, one format a GEMM** | **2.0** | **2.0** |",
    ]


def test_parts_with_and_without_predictions(folder: Path) -> None:
    parts = {
        "commit": "c",
        "machine": {"date": "2026-01-02", "cpu": "A CPU", "cores": 3, "gpu": None},
        "costs": {"fprop": 0.04},
        "fprop_by_layer": {"0": 0.03, "1": 0.01},
        "predicted_by_layer": {"0": 0.5, "1": 0.5},
        "fprop_by_kind": {"qkv": 0.04},
        "predicted_by_kind": {"qkv": 1.0},
    }
    (folder / "p.json").write_text(json.dumps(parts))
    lines = comparison_tables.made("parts", ["p"], folder).splitlines()
    assert lines[2:6] == [
        "| fprop, all linears | 40.0 |  |  |",
        "| fprop of layer 0 | 30.0 | 0.75 | 0.50 |",
        "| fprop of layer 1 | 10.0 | 0.25 | 0.50 |",
        "| fprop of qkv | 40.0 | 1.00 | 1.00 |",
    ]
    bare = {**parts, "predicted_by_layer": None, "predicted_by_kind": None}
    (folder / "p.json").write_text(json.dumps(bare))
    assert "SNIP's" not in comparison_tables.made("parts", ["p"], folder)


def test_everything_between_the_markers_is_replaced(folder: Path) -> None:
    text = "# T\n\n<!-- compare:short compare-x/fp4 -->\nold\n<!-- /compare -->\n\nend\n"
    made = comparison_tables.replaced(text, folder)
    assert "old" not in made and made.startswith("# T\n") and made.endswith("\n\nend\n")
    assert comparison_tables.replaced(made, folder) == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "there is no marker"),
        ("<!-- compare:short compare-x/fp4 -->\n", "one without an end"),
        ("<!-- compare:short compare-y -->\n<!-- /compare -->", "there is no"),
        ("<!-- compare:short compare-x -->\n<!-- /compare -->", "names 2 tables"),
        ("<!-- compare:short compare-x/fp8 -->\n<!-- /compare -->", "names 0 tables"),
        ("<!-- compare:long compare-x/fp4 -->\n<!-- /compare -->", "no kind of table"),
        ("<!-- compare:full compare-x/fp4 compare-x/fp3 -->\n<!-- /compare -->", "got 2"),
    ],
)
def test_a_marker_that_cannot_be_filled_is_refused(folder: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        comparison_tables.replaced(text, folder)


def test_check_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = min(RESULTS.glob("compare-forks-fp3-75.json")).stem
    file = tmp_path / "page.md"
    file.write_text(f"<!-- compare:short {name} -->\n<!-- /compare -->\n")
    assert comparison_tables.main(["--check", str(file)]) == 1
    assert "| random |" not in file.read_text()
    assert comparison_tables.main([str(file)]) == 0
    assert "| random |" in file.read_text()
    assert comparison_tables.main(["--check", str(file)]) == 0
    assert "out of date" in capsys.readouterr().out
