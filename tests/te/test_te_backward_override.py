"""NVTE_BACKWARD_OVERRIDE: plans name, and count, what runs.

Transformer Engine reads the variable when it is imported, so these tests have a process of their
own (tests/unit/linears/test_te_on_cpu.py).
"""

import os
from typing import Any

import pytest

from megatron_snip.linears.availability import available_options
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import Option
from megatron_snip.topology import Topology
from tests.models import EXPERTS, assignment, build, by_name, losses, planned, ran, resolved

OVERRIDE = os.environ.get("NVTE_BACKWARD_OVERRIDE", "")

pytestmark = pytest.mark.skipif(not OVERRIDE, reason="NVTE_BACKWARD_OVERRIDE is not set")


@pytest.mark.parametrize("changes", [{}, {"grouped": True, "fp4": "e2m1", **EXPERTS}])
def test_an_option_names_what_its_gemms_multiply(changes: dict[str, Any]) -> None:
    model = build(**changes)
    config = resolved(model, formats=("bf16", "fp8", "fp4"))
    assert config.formats == ("bf16", "fp8-bf16-bf16", "fp4-bf16-bf16")
    under = planned(model)
    assert available_options(config, under.job, under.refusals_of)[1].options == config.options
    words = {"bf16": "bf16", "fp8": "mxfp8", "fp4": "nvfp4"}
    for option in config.options:
        under.apply(assignment(under, str(option)))
        for module in by_name(under).values():
            module.seen.clear()
        losses(model)
        assert ran(under) == {tuple(words[name] for name in option.formats)}
    assert "says so" in str(under.linears[0].refusal(Option.uniform("fp4")))


def test_the_job_s_own_option_is_what_the_job_runs() -> None:
    model = build(fp8="e4m3", fp8_recipe="mxfp8")
    under = PlannedModel([model], Topology(), seed=0)
    under.install()
    losses(model)
    assert ran(under) == {("mxfp8", "bf16", "bf16")}
    assert set(map(str, under.job.options.values())) == {"fp8-bf16-bf16"}
    assert all(linear.runs_as_job for linear in under.linears)
