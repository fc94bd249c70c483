"""What a finished run ran in, and files that say something impossible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_snip.comparison.outcome import outcome_of
from megatron_snip.comparison.run import Run
from megatron_snip.comparison.schedule import make_schedule
from megatron_snip.comparison.store import Store
from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest, write_plan
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.trainer.config import linear_shapes
from tests.unit.comparison.build import comparison, outcome

RUNS = {run.name: run for run in make_schedule(comparison(seeds=1)).runs}
SNIP = RUNS["forks-fp3-75-snip-gemm-s0"]


def plan(linears: dict[str, Option], step: int) -> PrecisionPlan:
    return PrecisionPlan(
        step=step,
        policy="snip",
        status="optimal",
        objective=None,
        bound=None,
        seconds=0.0,
        target=0.75,
        efficiency=0.75,
        stages=(0.75,),
        linears=linears,
        digest=assignment_digest(linears),
    )


def made(store: Store, run: Run) -> list[str]:
    """A run of steps 6 to 9 that starts with fp3 everywhere and changes one linear at step 9."""
    config = store.config_of(run)
    names = [shape.name for shape in linear_shapes(config)]
    first = dict.fromkeys(names, Option.uniform("fp3"))
    write_plan(plan(first, 6), store.plan_file(run))
    directory = RunDirectory(store.run_dir(run))
    directory.start(config.model_dump(mode="json"))
    directory.plan(plan({**first, names[0]: Option.parse("fp8-fp3-fp8")}, 7))
    for step in range(run.first_step, run.last_step):
        values = {"step": step, "loss": 2.0, "lowest_precision_fraction": 1.0, "wall_s": 1.0}
        if step == 9:
            values |= {"plan_step": 7, "changed_linears": 1, "validation_loss": 2.0}
        directory.metrics(values)
    directory.close()
    return names


def test_options_are_shares_of_the_steps_also_before_the_first_change(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.locked():
        names = made(store, SNIP)
        found = store.finish(SNIP)
    assert found.options[names[0]] == pytest.approx({"fp3": 0.75, "fp8-fp3-fp8": 0.25})
    assert found.options[names[1]] == pytest.approx({"fp3": 1.0})
    shapes = linear_shapes(store.config_of(SNIP))
    flops = shapes[0].flops_per_token / sum(shape.flops_per_token for shape in shapes)
    assert found.shares["fp8"] == pytest.approx(flops * 0.25 * 2 / 3)
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_what_a_file_from_before_lacks_is_taken_from_the_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.locked():
        made(store, SNIP)
        new = outcome_of(SNIP, store.run_dir(SNIP), store.config_of(SNIP))
        path = store.path / "outcomes" / f"{SNIP.key}.json"
        old = {key: value for key, value in new.to_json().items() if key != "options"}
        path.write_text(json.dumps(old))
        assert store.outcome(SNIP) == new
        (store.run_dir(SNIP) / "metrics.jsonl").unlink()
        found = store.outcome(SNIP)
        assert found is not None and found.options == {}


@pytest.mark.parametrize(
    "options",
    [
        {"bogus": 1.0},
        {"fp8": 0.5},
        {"fp8": 1.5, "fp3": -0.5},
        {"fp8": None},
        {},
        {"fp8-fp3": 1.0},
    ],
)
def test_impossible_options_are_refused_with_the_file(
    tmp_path: Path, options: dict[str, float | None]
) -> None:
    store = Store(tmp_path)
    names = [shape.name for shape in linear_shapes(store.config_of(SNIP))]
    content = outcome(SNIP.key, 2.0).to_json()
    with store.locked():
        path = store.path / "outcomes" / f"{SNIP.key}.json"
        path.write_text(json.dumps({**content, "options": dict.fromkeys(names, options)}))
        with pytest.raises(UsageError, match="options of 'decoder") as caught:
            store.outcome(SNIP)
        assert str(path) in str(caught.value)
        path.write_text(json.dumps({**content, "options": {"another.linear": {"fp8": 1.0}}}))
        with pytest.raises(UsageError, match="other linears; remove it"):
            store.outcome(SNIP)
