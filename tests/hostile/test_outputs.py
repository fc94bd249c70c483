"""Hostile text in every name and label of a run's files: each output is refused or stays its text.

The linears, the policy, the notices, the settings and the versions of a run get texts of
`texts.py`. Then every command that prints or writes them runs, and the strictest
common reader of its format reads what it made: html.parser and ElementTree, csv, PyYAML, json.
"""

import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given, settings

from megatron_snip.__main__ import main
from megatron_snip.errors import printable
from megatron_snip.options import Option
from megatron_snip.planning.plan import assignment_digest, read_plan
from megatron_snip.reporting import figures, report
from megatron_snip.reporting.events import Notice
from tests.hostile.documents import fuzzed
from tests.hostile.texts import texts
from tests.unit.reporting.runs import Shape, config, write_run

COMMANDS = (
    "stats {run}",
    "stats {run} --health",
    "stats {run} --csv",
    "plan {run}/problems/3.json",
    "export {run}/plans/3.json --to yaml --output {out}",
    "export {run}/plans/3.json --capability 10.0 --nearest --output {out}",
    "export {run}/plans/3.json --to torchtitan --nearest --output {out}",
    "export {run}/plans/3.json --to modelopt --nearest --output {out}",
    "report {run} --output {folder}",
)


class Tags(HTMLParser):
    """The names of a page's elements and attributes, which no text may add to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(f"{tag} {name}" for name, _ in attributes)}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a run with one plan, by name."""
    notices = ((2, Notice("refresh_failed", "why")),)
    shape = Shape(config(), iterations=6, layers=1, notices=notices, backend="simulate")
    run = write_run(tmp_path_factory.mktemp("good"), shape)
    return {str(p.relative_to(run)): p.read_text() for p in run.rglob("*") if p.is_file()}


def with_texts(files: dict[str, str], run: Path, name: str, label: str, word: str) -> None:
    """Write a run's files with other texts: of the first linear, the policy, and all the rest."""
    linear = next(iter(json.loads(files["plans/3.json"])["linears"]))
    for file, content in files.items():
        path = run / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.replace(json.dumps(linear), json.dumps(name)))
    plan = json.loads((run / "plans/3.json").read_text())
    linears = {name: Option(**formats) for name, formats in plan["linears"].items()}
    plan |= {"policy": label, "digest": assignment_digest(linears)}
    (run / "plans/3.json").write_text(json.dumps(plan))
    rows = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
    rows[1]["notices"] = [{"kind": word, "message": word}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "versions.json").write_text(json.dumps({word: word, "torch": word}))
    values = yaml.safe_load(files["config.yaml"]) | {"note": word, f"key {word}": [word]}
    (run / "config.yaml").write_text(json.dumps(values))  # JSON is YAML


@pytest.mark.slow
def test_text_of_a_file_stays_text_in_every_output(
    good: dict[str, str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "frontier_of", lambda run: "none")  # it takes long
    run = tmp_path / "run"
    out = tmp_path / "out"
    folder = tmp_path / "page"
    places = {"run": run, "out": out, "folder": folder}
    drawn: list[bytes] = []
    draw = figures.svg

    def svg(figure: Any) -> bytes:
        drawn.append(draw(figure) if not drawn else drawn[0])  # one of them: it takes long
        return drawn[-1]

    monkeypatch.setattr(figures, "svg", svg)
    with_texts(good, run, "decoder.layers.0.mlp.linear_fc9", "snip", "word")
    assert [main(words.format(**places).split()) for words in COMMANDS] == [0] * len(COMMANDS)
    usual = Tags((folder / "report.html").read_text()).found
    answers: list[int] = []

    # Readers refuse names that are not printable, so some are; all are hostile.
    names = texts.map(printable) | texts
    labels = texts.map(printable) | texts

    @settings(fuzzed, max_examples=20)
    @given(name=names, label=labels, word=texts)
    def one(name: str, label: str, word: str) -> None:
        with_texts(good, run, f"decoder.layers.0.{name}", label, word)
        del drawn[:]
        for words in COMMANDS:
            out.unlink(missing_ok=True)
            capsys.readouterr()
            status = main(words.format(**places).split())
            answers.append(status)
            printed = capsys.readouterr()
            assert (printed.out + printed.err).replace("\n", "").isprintable()
            assert status == 0 or (status == 2 and printed.err.count("\n") == 1), words
            if status != 0:
                continue
            if "--csv" in words:
                cells = [
                    c for row in csv.reader(io.StringIO(printed.out), strict=True) for c in row
                ]
                assert not any(c.lstrip().startswith(("=", "@")) for c in cells)
            elif "yaml" in words:
                linears = read_plan(run / "plans/3.json").linears
                assert yaml.safe_load(out.read_text()).keys() == linears.keys()
            elif "capability" in words:
                assert set(yaml.safe_load(out.read_text())) == {"configs", "matchers"}
            elif "export" in words:
                json.loads(out.read_text())
            elif "report" in words:
                page = (folder / "report.html").read_text()
                assert Tags(page).found <= usual
                assert page.replace("\n", "").isprintable()
                ElementTree.fromstring(drawn[0])  # drawn a moment ago

    one()
    assert answers.count(0) > len(answers) / 4  # it is not all refused
