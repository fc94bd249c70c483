import copy
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.planning.problem import PlanningProblem, read_problem, write_problem

GOOD: dict[str, Any] = {
    "version": 1,
    "linears": [
        {
            "name": "decoder.layers.0.mlp.linear_fc1",
            "stage": 0,
            "flops": 10,
            "options": {
                "fp8": {"quality_loss": 0.0, "saving": 0},
                "fp4": {
                    "quality_loss": None,
                    "saving": 1,
                    "seconds": 0.5,
                    "scores": {"abs_error": 2.0, "rel_error": None},
                },
            },
        },
        {
            "name": "anything",
            "stage": 2,
            "flops": 1e30,
            "options": {"nvfp4": {"quality_loss": -1, "saving": 0.5}},
        },
    ],
    "target": 0.75,
}


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    problem = PlanningProblem.from_dict(GOOD)
    write_problem(problem, tmp_path / "p.json")
    assert read_problem(tmp_path / "p.json") == problem
    assert json.loads((tmp_path / "p.json").read_text()) == problem.to_dict()
    assert problem.names == ("decoder.layers.0.mlp.linear_fc1", "anything")
    assert problem.num_stages == 3
    assert problem.linears[0].options["fp4"].quality_loss is None


def change(path: list[Any], value: Any) -> dict[str, Any]:
    """GOOD with one place set to a value."""
    changed = place = copy.deepcopy(GOOD)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


OPTION = {"quality_loss": 1.0, "saving": 0.5}
FC1 = "decoder.layers.0.mlp.linear_fc1"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (change(["version"], 2), ["version 2", "reads version 1"]),
        (change(["extra"], 1), ["unknown key 'extra'"]),
        (change(["linears", 0, "layer"], 1), ["unknown key", "layer", FC1]),
        (change(["target"], 1.5), ["target", "1.5"]),
        (change(["linears"], []), ["linears", "at least 1 item"]),
        (change(["linears", 1, "name"], FC1), [FC1, "twice"]),
        (change(["linears", 0, "name"], "a\x1b[2Jb"), ["'a\\x1b[2Jb'", "not printable"]),
        (change(["linears", 0, "options", "a\nb"], OPTION), ["unknown format", FC1]),
        (change(["linears", 0, "options", "fp4-fp4-fp4"], OPTION), ["two spellings", FC1]),
        (change(["linears", 0, "stage"], -1), ["stage", "-1", FC1]),
        (change(["linears", 0, "flops"], -1), ["flops", "-1", FC1]),
        (change(["linears", 0, "options"], {}), ["options", FC1]),
        (change(["linears", 0, "options", "fp4"], {"saving": 1}), ["quality_loss"]),
        (change(["linears", 0, "options", "fp4", "quality_loss"], float("nan")), ["finite"]),
        (change(["linears", 0, "options", "fp4", "scores", "x"], "1"), ["scores.x"]),
        ([GOOD], ["JSON object", "list"]),
    ],
)
def test_a_bad_problem_is_refused_in_one_line_that_names_the_place(
    value: Any, words: list[str]
) -> None:
    with pytest.raises(UsageError, match=r"\Aproblem file 'p.json'[^\n]*\Z") as caught:
        PlanningProblem.from_dict(value, "problem file 'p.json'")
    assert all(word in str(caught.value) for word in words)
