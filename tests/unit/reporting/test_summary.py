"""The tables at the end of a run."""

from rich.console import Console

from megatron_snip.reporting.summary import SummaryReporter
from tests.unit.reporting.runs import Shape, config, tell


def shown(reporter: SummaryReporter) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in reporter.tables():
        console.print(table)
    return console.export_text()


def test_plans_and_linears_are_tabled() -> None:
    reporter = SummaryReporter()
    tell(reporter, Shape(config()))
    text = shown(reporter)
    assert "plans applied" in text and "measured at step 18" in text
    assert "decoder.layers.2.mlp.linear_fc2" in text
    assert len(reporter.applied) == 3
    plan = reporter.applied[-1].plan
    last = next(line for line in text.splitlines() if "layers.0.mlp.linear_fc2" in line)
    assert last.split()[-2] == str(plan.linears["decoder.layers.0.mlp.linear_fc2"])


def test_a_run_without_snip_has_nothing_to_table() -> None:
    reporter = SummaryReporter()
    tell(reporter, Shape(config(enabled=False)))
    assert reporter.tables() == []
