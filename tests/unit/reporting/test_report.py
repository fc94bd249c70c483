"""The report as a file: complete, self-contained, and indifferent to what its runs' files say."""

from __future__ import annotations

import io
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from megatron_snip.errors import UsageError
from megatron_snip.reporting.report.build import Report, distinct_names, make_report, read_runs
from megatron_snip.reporting.reporter import Event
from tests.unit.reporting.runs import KINDS, Shape, config, write_run
from tests.unit.reporting.sketch import only_sketch

pytestmark = pytest.mark.filterwarnings("error:constrained_layout")  # labels left no room

HOSTILE = "<img src=x onerror=alert(1)>\"'&{{ 7*7 }}</script>"
COMMON = ["frontier", "loss", "share", "step-time", "time"]
OWN = ["divergences", "plan", "plan-history", "stages"]


class Elements(HTMLParser):
    """Every element with its attributes, and the text between tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def report_of(*paths: Path) -> Report:
    return make_report(read_runs(paths))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder: Path) -> Report:
    """A run whose names, settings and events all try to be something else."""
    shape = Shape(
        config(wandb_project=HOSTILE),
        kinds=(*KINDS[:3], f"mlp.{HOSTILE}"),
        events=(Event(9, "fallback", HOSTILE),),
    )
    return report_of(write_run(folder / "a<b>&\"'run", shape))


def test_every_figure_is_there_with_a_title_a_caption_and_an_alternative_text(one: Report) -> None:
    page = Elements(one.html)
    assert sorted(f["id"] or "" for f in page.all("figure")) == sorted(COMMON + OWN)
    images = page.all("img")
    assert len(images) == 9
    assert all(len(image["alt"] or "") > 30 for image in images)
    assert len(page.all("figcaption")) == 9
    for words in ("Every plan", "Every linear", "All settings", "Versions", "Events"):
        assert words in page.text


def test_each_figure_is_a_png_too(one: Report, tmp_path: Path) -> None:
    page = one.write(tmp_path / "deep" / "report")
    assert page.read_text() == one.html
    files = {path.name for path in page.parent.iterdir()}
    assert files == {"report.html", *(f"{slug}.png" for slug in COMMON + OWN)}
    for slug in COMMON + OWN:
        with Image.open(io.BytesIO(one.pictures[f"{slug}.png"])) as image:
            assert image.width >= 1024 and len(image.convert("L").getcolors() or []) > 10


def test_the_page_asks_for_nothing_and_runs_nothing(one: Report) -> None:
    page = Elements(one.html)
    assert page.all("script") == [] and page.all("iframe") == []
    for _, attributes in page.found:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "srcset", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv"))
    assert policy is not None and "default-src 'none'" in policy
    assert "@import" not in one.html and "url(" not in one.html


def test_what_files_say_stays_text(one: Report) -> None:
    page = Elements(one.html)
    assert page.text.count(HOSTILE) >= 3  # the event, the setting, the linears
    assert "a<b>&\"'run" in page.text
    assert "{{ 7*7 }}" in page.text


def test_phones_and_dark_mode_have_drawings_of_their_own(one: Report) -> None:
    page = Elements(one.html)
    assert "width=device-width" in str(page.all("meta"))
    queries = [source["media"] or "" for source in page.all("source")]
    assert len(queries) == 27
    assert sum("dark" in query for query in queries) == 18
    assert sum("max-width" in query for query in queries) == 18


def test_the_same_run_gives_the_same_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_sketch(monkeypatch)
    shape = Shape(config(), steps=6, layers=1)
    path = write_run(folder / "again", shape)
    assert report_of(path) == report_of(path)


def test_several_runs_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_sketch(monkeypatch)
    runs = [
        write_run(folder / "first", Shape(config(), steps=16, layers=2)),
        write_run(folder / "second", Shape(config(efficiency_target=0.9), steps=12, layers=2)),
        write_run(folder / "off", Shape(config(enabled=False), steps=12)),
    ]
    report = report_of(*runs)
    names = [f"{k}-{slug}.png" for k in (1, 2) for slug in OWN]
    assert sorted(report.pictures) == sorted(names + [f"{slug}.png" for slug in COMMON])
    text = Elements(report.html).text
    assert "3 runs compared" in text and "Settings that differ" in text
    assert "snip.efficiency_target" in text and "SNIP was off in this run." in text


def test_a_run_that_has_just_begun_says_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_sketch(monkeypatch)
    report = report_of(write_run(folder / "young", Shape(config(), steps=1)))
    text = Elements(report.html).text
    assert "No plan has been applied yet." in text
    assert "The run has made no refresh." in text
    assert set(report.pictures) == {f"{s}.png" for s in ("loss", "share", "step-time", "time")}


def test_runs_are_told_apart_by_as_much_of_their_paths_as_it_takes() -> None:
    assert distinct_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert distinct_names([Path("/a/snip"), Path("/b/snip")]) == ["a/snip", "b/snip"]


def test_a_run_given_twice_and_an_output_that_is_a_file_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    path = write_run(folder / "twice", Shape(config(enabled=False), steps=2))
    with pytest.raises(UsageError, match="is given twice"):
        read_runs([path, folder / "." / "twice"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        Report("<html>", {}).write(tmp_path / "file")
