"""When a stopped run's measurements are enough to plan with."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.linears.availability import AvailableOptions
from megatron_snip.options import Option
from megatron_snip.run.observation import Observations
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.topology import Topology
from tests.unit.divergence.build import errors, linear

MEASURED = [linear(i, fp8=errors(1.0), fp4=errors(2.0)) for i in range(2)]
UNSEEN = replace(MEASURED[1], microbatches=0.0, tokens=0.0)


@pytest.mark.parametrize(
    ("rows", "formats", "enough"),
    [
        (MEASURED, ("fp8", "fp4"), True),
        (MEASURED, ("bf16", "fp4"), True),
        (MEASURED, ("fp8", "mxfp4"), False),
        (MEASURED[:1], ("fp8", "fp4"), False),
        ([MEASURED[0], UNSEEN], ("fp8", "fp4"), True),  # a frozen layer
        ([UNSEEN], ("fp8", "fp4"), False),
    ],
)
def test_linears_must_have_been_measured_in_every_format(
    rows: list[Any], formats: tuple[str, ...], enough: bool
) -> None:
    runtime = SimpleNamespace(topology=Topology())
    model: Any = SimpleNamespace(runtime=runtime, chunks=[], job=SimpleNamespace(linears=MEASURED))
    available: Any = SimpleNamespace(options=list(map(Option.uniform, formats)))
    observations = Observations(SnipConfig(), model, available, None)
    assert not observations.suffice(None)
    assert observations.suffice(StatisticsTable(5, 2.0, tuple(rows))) == enough


def test_a_problem_has_the_pins_of_the_run() -> None:
    """So that `megatron-snip plan` makes the run's plan from its file."""
    runtime = SimpleNamespace(topology=Topology())
    model: Any = SimpleNamespace(
        runtime=runtime,
        chunks=[],
        job=SimpleNamespace(linears=MEASURED),
        measured_formats=lambda _: {},
    )
    options = tuple(map(Option.uniform, ("fp8", "fp4")))
    pins = (("*.layers.0.*", "fp8"),)
    available = AvailableOptions(options, {}, pins=pins)
    observations = Observations(SnipConfig(formats=("fp8", "fp4")), model, available, None)
    mean = StatisticsTable(5, 2.0, tuple(MEASURED))
    _, problem = observations.problem(mean, 0.5)
    assert problem.pins == pins
