"""The tables at the end of a run."""

import io

from rich.console import Console

from megatron_snip.reporting.summary import SummaryWriter
from tests.unit.reporting.runs import Shape, config, write_events


def test_plans_and_linears_are_tabled() -> None:
    writer = SummaryWriter()
    write_events(writer, Shape(config()))
    console = Console(width=160, file=io.StringIO(), record=True)
    for table in writer.tables():
        console.print(table)
    text = console.export_text()
    assert "plans applied" in text and "measured at iteration 19" in text
    row = next(line for line in text.splitlines() if "layers.0.self_attention.linear_qkv" in line)
    assert row.split()[-2] == "fp4"


def test_a_run_without_snip_has_no_tables() -> None:
    writer = SummaryWriter()
    write_events(writer, Shape(config(enabled=False)))
    assert writer.tables() == []
