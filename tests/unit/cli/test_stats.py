"""`megatron-snip stats`: table, JSON, and bad input."""

import csv
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.reporting.runs import Shape, config, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of five layers with refreshes at iterations 3, 11 and 19."""
    return write_run(tmp_path / "run", Shape(config(), layers=5))


def test_the_last_refresh_is_a_table_of_100_columns_and_nothing_is_written(
    run: Path, printed: Any
) -> None:
    before = sorted(run.rglob("*"))
    text = printed("stats", run)
    assert "iteration 19, loss 4" in text and "decoder.layers.0.mlp.linear_fc2" in text
    assert "scores that order the linears" in text  # the heads are explained
    assert max(map(len, text.splitlines())) <= 100
    assert sorted(run.rglob("*")) == before


def test_the_last_refresh_is_one_of_the_run_as_it_went_on(run: Path, printed: Any) -> None:
    """It went back to a checkpoint of iteration 8."""
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"iteration": 9}\n')
    assert "iteration 3, loss 4" in printed("stats", run)
    (run / "metrics.jsonl").unlink()
    assert "iteration 19, loss 4" in printed("stats", run)


def test_iteration_and_order_can_be_chosen(run: Path, printed: Any) -> None:
    text = printed("stats", run, "--iteration", 11, "--sort", "loss")
    rows = [line.split() for line in text.splitlines() if "decoder" in line]
    assert "iteration 11" in text and sorted(row[1] for row in rows) == ["fp4"] * 20 + ["fp8"] * 20
    found = [float(row[2]) for row in rows]
    assert found == sorted(found, reverse=True)
    file = json.loads((run / "divergences" / "11.json").read_text())
    assert json.loads(printed("stats", run, "--iteration", 11, "--json")) == file


def test_the_noise_is_that_of_the_same_refresh_where_health_is_there(
    run: Path, printed: Any, refused: Any
) -> None:
    rows = [line.split() for line in printed("stats", run, "--sort", "noise").splitlines()]
    found = [float(row[-1]) for row in rows if row and row[0].startswith("decoder")]
    health = json.loads((run / "health/19.json").read_text())["linears"]
    noises = [value for linear in health for value in linear["gradient_noise"].values()]
    assert found == pytest.approx(sorted(noises, reverse=True), rel=0.01)
    (run / "health/19.json").write_text('{"version": 9}')
    assert "version 9; this megatron-snip reads version 1" in refused("stats", run)
    (run / "health/19.json").unlink()
    assert "decoder.layers.0.mlp.linear_fc2" in printed("stats", run)


def test_health_has_the_worst_first_in_100_columns(run: Path, printed: Any, refused: Any) -> None:
    text = printed("stats", run, "--health")
    assert max(map(len, text.splitlines())) <= 100 and "iteration 19" in text
    sqnr = text.partition("sqnr_db")[2].partition("underflow")[0]
    rows = [line.split() for line in sqnr.splitlines() if "decoder" in line]
    assert [float(row[-1]) for row in rows] == [11.0 + k // 2 for k in range(10)]
    file = run / "health/19.json"
    assert json.loads(printed("stats", run, "--health", "--json")) == json.loads(file.read_text())
    first, *lines = csv.reader(printed("stats", run, "--csv").splitlines())
    assert first == ["measure", "linear", "tensor", "format", "value"]
    assert len([line for line in lines if line[0] == "sqnr_db"]) == 20 * len(config().named_formats)
    file.write_text('{"version": 9}')
    assert "version 9; this megatron-snip reads version 1" in refused("stats", run, "--health")


def test_precision_is_what_linears_ran_in_an_iteration(
    tmp_path: Path, printed: Any, refused: Any
) -> None:
    """Plans run from 5, 13 and 21 on; a rule decides for no linear."""
    run = write_run(tmp_path / "te", Shape(config(), layers=5, backend="te"))
    text = printed("stats", run, "--precision")
    assert "from iteration 21 on, under plans/19.json" in text
    table = [line for line in text.splitlines() if "linears: " not in line]
    assert max(map(len, table)) <= 100
    file = run / "precision" / "13.json"
    record = json.loads(file.read_text())
    text = printed("stats", run, "--precision", "--iteration", 20)
    rows = [line.split() for line in text.splitlines() if line.startswith(" decoder")]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        (each["name"], each["option"], "bfloat16") for each in record["linears"]
    ]
    assert "no linear for --snip-pins: x=free" in text
    options = Counter(each["option"] for each in record["linears"])
    for option, count in options.items():
        chosen = f"{option} (te: {option}), weights in bfloat16, chosen by the plan, such as "
        assert f"{count} linears: {chosen}" in text
    assert json.loads(printed("stats", run, "--precision", "--iteration", 13, "--json")) == record
    first, *lines = csv.reader(printed("stats", run, "--precision", "--csv").splitlines())
    assert first == ["name", "option", "recipe", "backend", "weight_storage", "fixed"]
    assert len(lines) == len(record["linears"])
    assert "first plan of" in refused("stats", run, "--precision", "--iteration", 4)
    assert "--sort orders" in refused("stats", run, "--precision", "--sort", "loss")
    del record["unused_rules"]
    file.write_text(json.dumps({**record, "version": 2}))
    assert "no linear for" not in printed("stats", run, "--precision", "--iteration", 13)
    shutil.rmtree(run / "precision")
    assert "linears run what the job runs" in refused("stats", run, "--precision")


def test_names_are_printed_as_they_are(run: Path, printed: Any, refused: Any) -> None:
    path = run / "divergences" / "19.json"
    value = json.loads(path.read_text())
    name = "decoder.layers.0.[/foo] :smile:"
    value["linears"][0]["name"] = name
    path.write_text(json.dumps(value))
    assert name in printed("stats", run)
    value["linears"][0]["name"] = name + "\x1b[2J"
    path.write_text(json.dumps(value))
    assert "\\x1b[2J' is not printable" in refused("stats", run)
