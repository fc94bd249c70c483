"""Each figure shows what the record holds: read back from the drawn artists, not from pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import QuadMesh

from megatron_snip.formats import FORMATS
from megatron_snip.options import Option
from megatron_snip.reporting import figures
from megatron_snip.reporting.events import Notice
from megatron_snip.reporting.report import frontier_of
from megatron_snip.reporting.run_record import RunRecord, read_run
from megatron_snip.types import Gemm
from tests.unit.reporting.runs import Shape, config, write_run

pytestmark = pytest.mark.filterwarnings("error:constrained_layout")  # labels left no room
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
    for column, cells in enumerate(panels):
        for k, span in enumerate(run.plans):
            options = list(span.plan.linears.values())[column::4]
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
