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
    assert "plans applied" in text


def test_a_run_without_snip_has_no_tables() -> None:
    writer = SummaryWriter()
    write_events(writer, Shape(config(enabled=False)))
    assert writer.tables() == []
