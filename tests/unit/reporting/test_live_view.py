"""What a terminal shows of a run, and what is printed where there is none."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from megatron_snip.options import Option
from megatron_snip.reporting.live_run import LiveRun
from megatron_snip.reporting.live_view import follow, live_view, plan_grid, sparkline
from megatron_snip.reporting.reporter import Event, FileReporter
from megatron_snip.reporting.run_directory import RunDirectory
from tests.unit.reporting.runs import Shape, config, tell, write_run

CLEAR = "\x1b[2J"
EVENT = Event(7, "fallback", f"NaN [/bold] {CLEAR}back to fp8")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run [red]", Shape(config(), events=(EVENT,)))


def drawn(path: Path, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100, color_system=None)
    follow([LiveRun(path)], console, wait=lambda _: pytest.fail("the run has ended"))
    return stream.getvalue()


def test_a_terminal_shows_progress_losses_plan_and_events(path: Path) -> None:
    text = drawn(path, terminal=True)
    assert "run [red] (finished)" in text
    assert "step 24 of 24" in text
    assert "FLOPs in fp4" in text and "validation" in text and "tokens/s" in text
    assert "plan of step 18, applied before step 20" in text
    assert text.count("fp4   ") >= 1 and "qkv" in text


def test_what_files_say_is_neither_markup_nor_a_command(path: Path) -> None:
    for terminal in (True, False):
        text = drawn(path, terminal)
        assert CLEAR not in text
        assert r"fallback: NaN [/bold] \x1b[2Jback to fp8" in text


def test_without_a_terminal_plans_and_events_are_lines(path: Path) -> None:
    lines = drawn(path, terminal=False).splitlines()
    assert len(lines) == 3 + 1 + 1
    assert "step 4: plan of step 2" in lines[0]
    assert lines[-1].startswith(f"{path}: finished after step 23, loss ")


def test_new_lines_are_told_once_while_the_run_goes_on(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.start({"train_iters": 24, "snip": config().model_dump(mode="json")})
    ends = iter((6, 13, 24))
    made = 0

    def wait(_: float) -> None:
        nonlocal made
        end = next(ends)
        tell(FileReporter(directory), Shape(config(), steps=end), first=made, close=False)
        made = end

    stream = io.StringIO()
    follow([LiveRun(tmp_path)], Console(file=stream, force_terminal=False), wait)
    told = [line for line in stream.getvalue().splitlines() if "plan of step" in line]
    assert len(told) == len(set(told)) == 3
    directory.close()


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    RunDirectory(tmp_path).start({"train_iters": 3})
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(live_view(LiveRun(tmp_path)))
    assert "waiting for the first step" in console.export_text()


def test_large_models_show_the_first_and_the_last_layers() -> None:
    names = [f"decoder.layers.{k}.mlp.linear_fc1" for k in range(126)]
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(plan_grid(dict.fromkeys(names, Option.uniform("fp4"))))
    rows = [line.split()[0] for line in console.export_text().splitlines()]
    assert len(rows) == 42 and rows[1] == "0" and rows[-1] == "125" and "..." in rows


def test_mixed_options_show_the_bits_of_each_gemm() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(plan_grid({"decoder.layers.0.mlp.linear_fc1": Option("fp4", "fp8", "bf16")}))
    assert console.export_text().splitlines()[-1].split() == ["0", "4", "8", "16"]


def test_names_from_files_cannot_break_the_grid() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(plan_grid({"decoder.layers.0.x[/y]\x1b[2J": Option.uniform("fp4"), "[/z]": BF16}))
    text = console.export_text()
    assert "[/z]" in text and "\x1b" not in text


BF16 = Option.uniform("bf16")


def test_sparklines_rise_and_fall_with_their_values() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([1, 1], 5, "abcdefgh") == "aa"
    assert sparkline([0, 7], 5, "abcdefgh") == "ah"
    assert sparkline([0, 2, 6, 8], 2, "abcdefgh") == "ah"
