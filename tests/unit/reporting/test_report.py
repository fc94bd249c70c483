"""The report, its figures and its numbers.

The page is complete, self-contained, and safe whatever the runs' files hold. Figures show what the
record holds: they are read back from the drawn artists, not from pixels.
"""

import base64
import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.collections import QuadMesh

from megatron_snip.formats import FORMATS
from megatron_snip.options import Option
from megatron_snip.reporting import figures
from megatron_snip.reporting.events import Notice
from megatron_snip.reporting.report import frontier_of, last_gap, make_report, read_reference
from megatron_snip.reporting.run_record import RunRecord, parse_divergences, read_run
from megatron_snip.reporting.text import SOLVER_NOISE, column, number, percent, quality, seconds
from megatron_snip.types import Gemm
from tests.unit.planning.build import MODULES
from tests.unit.reporting.runs import Shape, config, write_run

pytestmark = pytest.mark.filterwarnings("error:constrained_layout")  # labels left no room

HOSTILE = "<img src=x onerror=alert(1)>\"'&{{ 7*7 }}</script>"
CONTROLS = "\x1b[2J\x00\u202e\r"
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
        kinds=(*MODULES[:3], f"mlp.{HOSTILE}$x^$"),
        notices=(
            (9, Notice("reverted", HOSTILE + CONTROLS)),
            (13, Notice("refresh_failed", "out of memory")),
        ),
        backend="simulate",
        note=HOSTILE + CONTROLS,
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
    assert page.text.count(HOSTILE + r"\x1b[2J\x00\u202e\r") >= 2  # a notice, a setting
    assert all(line.isprintable() for line in one.split("\n"))
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
    assert "needs a run in BF16 (--reference)" in alone and "(--reference)" not in text


def test_each_fixed_linear_is_shown_with_what_fixes_it(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "fixed"
    shutil.copytree(folder / "off", copy)
    rows = [
        {"name": "decoder.layers.0.mlp.linear_fc1", "option": "bf16", "backend": "te"},
        {"name": "decoder.layers.0.mlp.linear_fc2", "option": "fp8", "backend": "te"},
    ]
    rows[0]["fixed"] = "--snip-pins"
    (copy / "precision").mkdir(exist_ok=True)
    (copy / "precision/1.json").write_text(json.dumps({"version": 2, "linears": rows}))
    page = make_report(read_run(copy))
    section = page.partition("Linears with a fixed option")[2].partition("</details>")[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", section)
    assert cells == [rows[0]["name"], "bf16", "--snip-pins"]


def test_the_loss_increase_is_shown_by_group_of_linears(
    one: str, folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "groups"
    shutil.copytree(folder / "off", copy)
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    found = {"loss_increase": 2e-3, "loss_increase_error": 1e-4}
    found |= {"increase_of/first_third": -5e-4, "increase_of/first_third_error": None}
    row = json.loads(lines[3]) | {f"eval/{name}": value for name, value in found.items()}
    (copy / "metrics.jsonl").write_text("\n".join([*lines[:3], json.dumps(row), *lines[4:], ""]))
    page = make_report(read_run(copy))
    section = page.partition("<h3>Where the loss increase comes from")[2].partition("</section>")[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", section)
    assert cells == ["the plan", "+2.00e-03", "1.0e-04", "first third", "-5.00e-04", "-"]
    assert f"The evaluation at iteration {row['iteration']}" in section
    assert "Where the loss increase" not in one


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


def test_a_reference_of_the_run_that_is_not_here_costs_the_gap_alone(
    folder: Path, tmp_path: Path, printed: Any, refused: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The run was copied, or is read from another folder."""
    run = write_run(tmp_path / "run", Shape(config(reference="runs/bf16")))
    printed("report", run)
    assert "the report has no loss gap: cannot find the reference 'runs/bf16'" in caplog.text
    assert "cannot find" in refused("report", run, "--reference", "runs/bf16")


def test_a_run_names_its_reference(folder: Path, tmp_path: Path, printed: Any) -> None:
    run = shutil.copytree(folder / "off", tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["snip"]["reference"] = str(folder / "a<b>&\"'run")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    printed("report", run)
    page = (run / "report" / "report.html").read_text()
    assert "loss gap to a&lt;b&gt;" in page and "give --reference" not in page


NAMES = list(FORMATS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    shape = Shape(config(), stages=3, notices=((13, Notice("refresh_failed", "why")),))
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "run", shape))


@pytest.fixture(scope="module")
def by_gemm(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    shape = Shape(config(granularity="gemm"), iterations=16)
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "gemm", shape))


def meshes(figure: Any) -> list[np.ndarray]:
    """Return the values of every map, in the order of panels, without color bars."""
    found = []
    for axes in figure.axes:
        for mesh in axes.collections if axes.get_label() != "<colorbar>" else ():
            if isinstance(mesh, QuadMesh):
                rows = mesh._coordinates.shape[0] - 1
                found.append(np.ma.filled(mesh.get_array().reshape(rows, -1), np.nan))
    return found


def index(option: Option, gemm: Gemm = Gemm.FPROP) -> int:
    return NAMES.index(option[gemm])


def test_a_plan_has_a_cell_per_linear_or_per_gemm(run: RunRecord, by_gemm: RunRecord) -> None:
    assert run.plan is not None and by_gemm.plan is not None
    (cells,) = meshes(figures.plan_map(run.plan.linears))
    wanted = [index(option) for option in run.plan.linears.values()]
    assert np.array_equal(cells, np.array(wanted).reshape(3, 4))
    (cells,) = meshes(figures.plan_map(by_gemm.plan.linears))
    wanted = [index(o, gemm) for o in by_gemm.plan.linears.values() for gemm in Gemm]
    assert np.array_equal(cells, np.array(wanted).reshape(3, 12))


def test_the_history_has_a_panel_per_kind_and_gemm(run: RunRecord, by_gemm: RunRecord) -> None:
    figure = figures.plan_history(run.plans)
    panels = meshes(figure)
    assert len(panels) == 4 and figure.axes[0].get_xlim() == (5, 25)
    for panel, cells in enumerate(panels):
        for k, span in enumerate(run.plans):
            options = list(span.plan.linears.values())[panel::4]
            assert cells[:, k].tolist() == [index(option) for option in options]
    figure = figures.plan_history(by_gemm.plans)
    titles = [axes.get_title("left") for axes in figure.axes]
    assert len(set(titles)) == 12
    options = list(by_gemm.plans[-1].plan.linears.values())[3::4]
    last = meshes(figure)[titles.index("fc2, wgrad")][:, -1]
    assert last.tolist() == [index(option, Gemm.WGRAD) for option in options]


def test_divergences_share_one_logarithmic_scale(run: RunRecord) -> None:
    assert run.divergences is not None
    figure = figures.divergence_maps(run.divergences)
    drawn = [axes for axes in figure.axes if axes.collections and axes.get_title("left")]
    assert [axes.get_title("left") for axes in drawn] == [
        f"{kind} divergence, {option}" for kind in ("loss", "weight") for option in ("fp8", "fp4")
    ]
    values = run.divergences.values("fp4", "loss_divergence")
    assert meshes(figure)[1].ravel().tolist() == list(values.values())
    assert drawn[0].collections[0].norm is drawn[1].collections[0].norm
    scales = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    ticks = [text.get_text() for axes in scales for text in axes.get_yticklabels()]
    assert len(ticks) == 6 and all(float(text) > 0 for text in ticks)  # no TeX


@pytest.mark.parametrize("value", [0.0, -1.0, None, 1e-300])
def test_divergences_without_a_scale_are_drawn(value: float | None) -> None:
    options = {"fp4": {"loss_divergence": value, "weight_divergence": value}}
    linears = [{"name": f"decoder.layers.{n}.mlp.linear_fc1", "options": options} for n in (0, 1)]
    record = parse_divergences({"version": 2, "iteration": 1, "linears": linears})
    assert figures.svg(figures.divergence_maps(record))


def test_losses_show_plan_changes_failures_and_the_gap(run: RunRecord, by_gemm: RunRecord) -> None:
    axes = figures.loss_curves(run).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    iterations, losses = run.metrics.column("loss")
    assert np.array_equal(lines["training"].get_xdata(), iterations)
    assert np.array_equal(lines["training"].get_ydata(), losses)
    assert lines["validation"].get_xdata().tolist() == [10, 20]
    changes = [span.start for span in run.plans if span.num_changed]
    marked = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert sorted(marked) == sorted([*changes, 13]) and changes
    _, lower = figures.loss_curves(run, ("BF16", by_gemm.metrics)).axes
    gap = lower.lines[-1]
    assert gap.get_xdata().tolist() == list(range(1, 17))  # iterations that both have
    assert np.allclose(gap.get_ydata(), 0.0)


def test_the_star_is_on_the_frontier(run: RunRecord) -> None:
    assert run.plan is not None
    points = frontier_of(run)
    assert not isinstance(points, str)
    star = (run.plan.efficiency, run.quality_share(run.plan.objective))
    curve, marker = figures.frontier_curve(points, star, "fp4").axes[0].lines
    assert all(np.diff(curve.get_ydata()) >= -1e-12)
    on_curve = np.interp(star[0], curve.get_xdata(), curve.get_ydata())
    assert marker.get_ydata()[0] == pytest.approx(on_curve)


@pytest.mark.parametrize("layers", [1, 126])
def test_small_and_large_models_are_drawn(tmp_path: Path, layers: int) -> None:
    names = [f"decoder.layers.{k}.mlp.linear_fc1" for k in range(layers)] + ["$odd$ name"]
    linears = dict.fromkeys(names, Option.uniform("fp4"))
    figure = figures.plan_map(linears)
    (cells,) = meshes(figure)
    assert np.isfinite(cells).sum() == layers + 1
    assert figures.svg(figure).startswith(b"<?xml")


def test_numbers() -> None:
    assert number(1.23456) == "1.235" and number(math.inf) == "-" and percent(0.6111) == "61.1%"
    assert quality(-3.79e-14) == "0" and quality(0.5) == "0.5"
    durations = (None, 0.004, 0.0996, 0.5, 12.34, 250.0, 12000.0, -0.25)
    assert [*map(seconds, durations)] == [
        *("-", "4 ms", "100 ms", "500 ms", "12.3 s", "4 min 10 s", "3 h 20 min", "-250 ms")
    ]


def test_a_column_has_one_number_of_decimals() -> None:
    assert column([12.5, None, 0.0, 3.79e-14], SOLVER_NOISE) == ["12.50", "-", "0.00", "0.00"]
    assert column([0.5, 1e-5, 0.0]) == ["5.00e-01", "1.00e-05", "0.00e+00"]
    assert column([1e-12, math.inf]) == ["1.00e-12", "-"]
    assert column([54321.0, 1.0]) == ["54321", "1"] and column([0.0]) == ["0.000"]
