"""README tables from what the benchmarks wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from megatron_snip.errors import UsageError


def report(gpu: str | None, **parts: Any) -> dict[str, Any]:
    machine = {"gpu": gpu, "cpu": "AMD EPYC", "versions": {"torch": "2.13.0"}}
    return {"machine": machine, **parts}


LINEAR = {
    "results": [
        {
            "shape": [16384, 4096, 4096],
            "bf16_tflops": 771.4,
            "speedup_over_bf16": {"bf16": 1.0, "fp8 simulate": 0.851},
        }
    ]
}
SWITCH = {
    "linears": 16,
    "apply_seconds": 4e-5,
    "step_seconds": 0.4,
    "step_after_switch_seconds": 0.41,
    "extra_steps": 0.025,
}


def test_a_row_for_what_was_measured_and_blanks_for_the_rest() -> None:
    text = tables.markdown("linear", [report("NVIDIA H200", linear=LINEAR)])
    last = text.splitlines()[-1]
    assert last == ("| NVIDIA H200, torch 2.13.0 | 16384 x 4096 x 4096 | 771 | 0.85x |  |")
    widths = {line.count("|") for line in text.splitlines()}
    assert len(widths) == 1


def test_every_table_has_the_columns_of_its_header() -> None:
    model = {"seconds": {"bf16": 0.1}, "over_bf16": {"bf16": 1.0}, "recipes": {"bf16": "megatron"}}
    kernel = {
        "name": "fp8 1x128",
        "milliseconds": 1.0,
        "gigabytes_per_s": 9.0,
        "copy_fraction": 0.9,
        "goal": None,
    }
    found = report(
        None,
        linear=LINEAR,
        kernels={"results": [kernel]},
        step={"models": {"demo": model}},
        switch=SWITCH,
        device={"copy_gigabytes_per_s": 9.0, "bf16_tflops": 0.1, "checks": [{"met": False}]},
        refresh={
            "iteration_s": 0.1,
            "refresh_s": 0.3,
            "ratio": 3.0,
            "held_share_of_parameters": 1e-6,
            "extra_peak_over_bf16_gradients": 0.9,
        },
    )
    for name in tables.TABLES:
        lines = tables.markdown(name, [found]).splitlines()
        assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1
        assert lines[-1].startswith("| AMD EPYC, one core, torch 2.13.0 | ")


def test_what_failed_or_was_never_run_says_how_to_measure() -> None:
    failed = report("NVIDIA H200", linear={"failed": "not done after 150 s"})
    assert "make bench-gpu" in tables.markdown("linear", [failed])
    assert "make bench-gpu" in tables.markdown("step", [])


def test_between_markers_alone(tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    (results / "gpu.json").write_text(json.dumps(report("NVIDIA H200", switch=SWITCH)))
    (results / "planner.json").write_text("[]")
    other = "# Title\n\n<!-- bench:switch -->\nold\n<!-- /bench:switch -->\n\nthe end\n"
    page.write_text(other)
    arguments = ["--results", str(results)]
    (results / "planner.json").write_text(json.dumps({"instances": []}))
    assert tables.main([*arguments, "--check", str(page)]) == 1
    assert tables.main([*arguments, "--write", str(page)]) == 0
    assert tables.main([*arguments, "--check", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- bench:switch -->\n| machine |")
    assert text.endswith("<!-- /bench:switch -->\n\nthe end\n")
    assert "old" not in text
    assert "| 16 | 0.040 | 400 | 410 | +0.03 |" in text or "| +0.02 |" in text


def test_markers_that_say_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="no table is called 'speed'; known: device, linear, "):
        tables.replaced("<!-- bench:speed -->\n<!-- /bench:speed -->\n", [])
    with pytest.raises(UsageError, match="has no '<!-- /bench:step -->' after it"):
        tables.replaced("<!-- bench:step -->\n", [])
    with pytest.raises(UsageError, match="no marker for a table; put the lines"):
        tables.replaced("# A page\n", [])


def test_goals_of_kernels_are_not_the_reference_path_s() -> None:
    result = {
        "name": "fp8",
        "milliseconds": 1.0,
        "gigabytes_per_s": 9.0,
        "copy_fraction": 0.9,
        "goal": 0.85,
    }
    on_gpu = tables.markdown("kernels", [report("NVIDIA H200", kernels={"results": [result]})])
    assert on_gpu.endswith("| 0.90 | >= 0.85 |")
    on_cpu = tables.markdown("kernels", [report(None, kernels={"results": [result]})])
    assert on_cpu.endswith("| 0.90 |  |")


def test_the_readme_holds_what_was_measured() -> None:
    assert tables.main(["--check", str(Path(tables.__file__).parents[1] / "README.md")]) == 0
