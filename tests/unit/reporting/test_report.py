"""The report as a file: complete, self-contained, and safe whatever the runs' files hold."""

import base64
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_snip.reporting.events import Notice
from megatron_snip.reporting.report import frontier_of, last_gap, make_report, read_reference
from megatron_snip.reporting.run_record import read_run
from tests.unit.planning.build import MODULES
from tests.unit.reporting.runs import Shape, config, write_run

pytestmark = pytest.mark.filterwarnings("error:constrained_layout")  # labels left no room

HOSTILE = "<img src=x onerror=alert(1)>\"'&{{ 7*7 }}</script>"
VOID = {"meta", "link", "img", "br"}


class Elements(HTMLParser):
    """Every element with its attributes, and the text between tags; refuses unbalanced tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: one with hostile names, one without SNIP."""
    folder = tmp_path_factory.mktemp("runs")
    hostile = Shape(
        config(),
        kinds=(*MODULES[:3], f"mlp.{HOSTILE}"),
        notices=((9, Notice("reverted", HOSTILE)), (13, Notice("refresh_failed", "out of memory"))),
        backend="simulate",
        note=HOSTILE,
    )
    write_run(folder / "a<b>&\"'run", hostile)
    write_run(folder / "off", Shape(config(enabled=False), iterations=12))
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> str:
    return make_report(read_run(folder / "a<b>&\"'run"), read_reference(folder / "off"))


def test_every_figure_has_a_title_a_caption_and_an_alternative_text(one: str) -> None:
    page = Elements(one)
    slugs = {figure["id"] for figure in page.all("figure")}
    assert slugs == {
        "loss",
        "frontier",
        "plan",
        "plan-history",
        "divergences",
        "health",
        "health-worst",
    }
    assert all(len(image["alt"] or "") > 30 for image in page.all("img"))
    assert len(page.all("figcaption")) == len(page.all("img")) == 7
    for image in page.all("img"):
        kind, data = (image["src"] or "").split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        ElementTree.fromstring(base64.b64decode(data))
    for title in ("All plans", "All settings", "Failures"):
        assert title in page.text


def test_text_from_files_stays_text_and_the_page_needs_no_network(one: str) -> None:
    page = Elements(one)
    assert page.text.count(HOSTILE) >= 2  # a notice, a setting
    assert "a<b>&\"'run" in page.text and "{{ 7*7 }}" in page.text
    assert page.all("script") == [] and page.all("iframe") == []
    for _, attributes in page.found:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "srcset", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv"))
    assert policy is not None and "default-src 'none'" in policy
    assert "@import" not in one and "url(" not in one


def test_numbers_have_a_scale_and_failures_are_called_failures(one: str) -> None:
    text = Elements(one).text
    assert "refresh failed, plan unchanged" in text and "plan reverted" in text
    assert "Current plan (simulated)" in text and "Simulated: losses are those" in text
    assert "loss gap to BF16" in text and "+0.0000" in text
    assert "100%: all linears in fp4" in text and "of uniform fp4's" in text
    assert "1 failed" in text
    assert "predicted saving of a step" in text and "7 ms" in text and "250 ms" in text


def test_the_same_run_gives_the_same_page_and_a_young_one_names_what_is_missing(
    folder: Path, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "run", Shape(config(), iterations=1))
    page = make_report(read_run(path))
    assert page == make_report(read_run(path))
    text = Elements(page).text
    assert "No plan was applied yet." in text and "The run has made no refresh." in text
    assert "simulated" not in text
    alone = make_report(read_run(folder / "a<b>&\"'run"))
    assert "give --reference, a run in BF16" in alone and "give --reference" not in text


def test_the_gap_is_the_mean_over_the_last_tenth(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "bf16.jsonl"
    rows = [f'{{"iteration": {k}, "loss": {1.0 if k > 10 else 9.0}}}\n' for k in range(1, 13)]
    path.write_text("".join(rows))
    run = read_run(folder / "off")
    gap, count = last_gap(run.metrics, read_reference(path))
    assert read_reference(path)[0] == read_reference(folder / "off")[0] == "BF16"
    fp8 = config(policy="uniform-fp8")  # nothing in the lowest precision
    assert read_reference(write_run(tmp_path / "fp8", Shape(fp8)))[0] == "fp8"
    losses = run.metrics.column("loss")[1]
    assert count == 2 and gap == pytest.approx(losses[-2:].mean() - 1.0)


def test_the_frontier_keeps_the_runs_pins(tmp_path: Path) -> None:
    pinned = config(pins=("decoder.layers.0.*=fp8",), pipeline_balance="stage")
    found = frontier_of(read_run(write_run(tmp_path / "run", Shape(pinned))))
    assert not isinstance(found, str)
    assert max(efficiency for efficiency, _ in found) == pytest.approx(2 / 3)


def test_the_command_writes_one_file_and_prints_its_path(
    folder: Path, tmp_path: Path, printed: Any
) -> None:
    words = ["report", folder / "off", "--reference", folder / "a<b>&\"'run"]
    text = printed(*words, "--output", tmp_path / "out")
    assert text == f"{tmp_path / 'out' / 'report.html'}\n"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    printed(*words)
    assert (folder / "off" / "report" / "report.html").stat().st_size > 10_000


def test_a_run_names_its_reference(folder: Path, tmp_path: Path, printed: Any) -> None:
    run = shutil.copytree(folder / "off", tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["snip"]["reference"] = str(folder / "a<b>&\"'run")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    printed("report", run)
    page = (run / "report" / "report.html").read_text()
    assert "loss gap to a&lt;b&gt;" in page and "give --reference" not in page
