"""`megatron-snip schema`: the files of a run are what the schemas say, and damaged ones are not."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.cli.schema import SCHEMAS
from tests.hostile.documents import CALIBRATION, DIVERGENCES, METRICS, PLAN, PRECISION, PROBLEM
from tests.schema_check import check, check_run, faults
from tests.unit.reporting.runs import Shape, config, write_run

DOCUMENTS: dict[str, dict[str, Any]] = {
    "plan": PLAN.to_dict(),
    "problem": PROBLEM.to_dict(),
    "precision": PRECISION,
    "divergences": DIVERGENCES,
    "calibration": CALIBRATION,
    "metrics": METRICS,
}


def test_every_file_of_a_run_is_what_its_schema_says(tmp_path: Path) -> None:
    settings = config(pins="*.linear_proj=fp8", alert="underflow>0.3", target_schedule="9:0.5")
    found = check_run(write_run(tmp_path / "run", Shape(settings, backend="te")))
    assert found == {
        **dict.fromkeys(("config", "versions", "metrics"), 1),
        **dict.fromkeys(("problem", "plan", "precision", "divergences", "health"), 3),
    }


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_json_and_refuses_other_files(name: str, printed: Any) -> None:
    made = json.loads(printed("schema", name))
    assert made["$schema"].endswith("2020-12/schema") and made["title"].startswith(name)
    check(name, DOCUMENTS[name])
    for key in made["required"]:
        broken = copy.deepcopy(DOCUMENTS[name])
        del broken[key]
        assert list(faults(broken, made, made)) == [f"$: no {key}"]
        assert list(faults({**broken, key: []}, made, made)) or key in ("linears", "stages")
    if "version" in made["properties"]:
        assert list(faults({**DOCUMENTS[name], "version": 9}, made, made))


def test_properties_are_described(printed: Any, refused: Any) -> None:
    made = json.loads(printed("schema", "precision"))
    linear = made["$defs"]["LinearPrecision"]
    assert linear["properties"]["weight_storage"]["description"].startswith("dtype of the param")
    assert "Attributes" not in linear["description"]
    snip = json.loads(printed("schema", "config"))["$defs"]["SnipConfig"]
    assert "--snip-cost" in snip["properties"]["calibration"]["description"]
    names = printed("schema")
    assert all(f"{name} " in names for name in SCHEMAS)
    assert "invalid choice: 'plans'" in refused("schema", "plans")
