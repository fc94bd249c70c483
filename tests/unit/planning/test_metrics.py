import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.planning.metrics import default_statistics, read_metrics

GOOD: dict[str, Any] = {
    "version": 1,
    "step": 20,
    "linears": [
        {
            "name": "a",
            "flops": 1.0,
            "options": {"fp4": {"abs_error": 1, "rel_error": None, "note": "text"}},
        }
    ],
    "more": {},
}


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def test_numbers_are_read_and_the_rest_is_passed_over(tmp_path: Path) -> None:
    metrics = read_metrics(write(tmp_path / "d.json", GOOD))
    assert metrics == {"a": {"fp4": {"abs_error": 1.0, "rel_error": None}}}


@pytest.mark.parametrize(
    "value",
    [
        [],
        GOOD | {"version": 2},
        GOOD | {"linears": {}},
        GOOD | {"linears": [{"options": {}}]},
        GOOD | {"linears": [{"name": "a", "options": {"fp4": 1}}]},
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UsageError, match=r"statistics file '.*d\.json'"):
        read_metrics(write(tmp_path / "d.json", value))


def test_a_run_s_statistics_lie_beside_its_problems(tmp_path: Path) -> None:
    problem = write(tmp_path / "run" / "problems" / "20.json", {})
    assert default_statistics(problem) is None
    beside = write(tmp_path / "run" / "divergences" / "20.json", GOOD)
    assert default_statistics(problem) == beside.resolve()
    assert default_statistics(write(tmp_path / "elsewhere" / "20.json", {})) is None
