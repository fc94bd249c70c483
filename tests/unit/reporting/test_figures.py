"""Each picture shows what the record holds: read back from the drawn artists, not from pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import QuadMesh

from megatron_snip.options import Option
from megatron_snip.reporting.figures import divergence, pareto, plan, stages, time, training
from megatron_snip.reporting.figures.canvas import HALF, LIGHT, NARROW, WIDE, Canvas, png
from megatron_snip.reporting.figures.palette import NAMES
from megatron_snip.reporting.phases import Phases
from megatron_snip.reporting.report.frontiers import frontier_of
from megatron_snip.reporting.reporter import Event
from megatron_snip.reporting.run_record import RunRecord, read_run
from megatron_snip.types import Gemm
from tests.unit.reporting.runs import Shape, config, write_run

EVENT = Event(13, "kept", "why")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    shape = Shape(config(), stages=3, events=(EVENT,))
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "run", shape))


@pytest.fixture(scope="module")
def by_gemm(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    shape = Shape(config(granularity="gemm", seed=3), steps=16)
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "gemm", shape))


def meshes(figure: object) -> list[np.ndarray]:
    """Values of every grid of cells, in the order of panels; color bars are no such grids."""
    found = []
    for axes in figure.axes:  # type: ignore[attr-defined]
        if axes.get_label() == "<colorbar>":
            continue
        for mesh in axes.collections:
            if isinstance(mesh, QuadMesh):
                found.append(
                    np.ma.filled(
                        mesh.get_array().reshape(mesh._coordinates.shape[0] - 1, -1), np.nan
                    )
                )
    return found


def index(option: Option, gemm: Gemm = Gemm.FPROP) -> int:
    return NAMES.index(option[gemm])


def test_a_plan_is_a_cell_a_linear(run: RunRecord) -> None:
    assert run.plan is not None
    with HALF.style():
        (cells,) = meshes(plan.plan_map(HALF, run.plan.linears))
    wanted = np.array([index(option) for option in run.plan.linears.values()]).reshape(3, 4)
    assert np.array_equal(cells, wanted)


def test_mixed_options_are_a_cell_a_gemm(by_gemm: RunRecord) -> None:
    assert by_gemm.plan is not None
    with HALF.style():
        (cells,) = meshes(plan.plan_map(HALF, by_gemm.plan.linears))
    wanted = [index(o, gemm) for o in by_gemm.plan.linears.values() for gemm in Gemm]
    assert np.array_equal(cells, np.array(wanted).reshape(3, 12))


@pytest.mark.parametrize("canvas", [WIDE, NARROW])
def test_the_history_is_a_panel_a_kind_over_the_steps(run: RunRecord, canvas: Canvas) -> None:
    with canvas.style():
        figure = plan.plan_history(canvas, run.spans)
        panels = meshes(figure)
    assert len(panels) == 4
    for column, cells in enumerate(panels):
        for k, span in enumerate(run.spans):
            options = list(span.linears.values())[column::4]
            assert cells[:, k].tolist() == [index(option) for option in options]
    assert figure.axes[0].get_xlim() == (0, 24)


def test_the_history_by_gemm_has_a_panel_for_each(by_gemm: RunRecord) -> None:
    for canvas in (WIDE, NARROW):
        with canvas.style():
            figure = plan.plan_history(canvas, by_gemm.spans)
            panels = meshes(figure)
        titles = [axes.get_title("left") for axes in figure.axes]
        assert len(panels) == 12 and len(set(titles)) == 12
        at = titles.index("fc2, wgrad")
        options = list(by_gemm.spans[-1].linears.values())[3::4]
        assert panels[at][:, -1].tolist() == [index(o, Gemm.WGRAD) for o in options]


def test_divergences_are_drawn_on_one_logarithmic_scale(run: RunRecord) -> None:
    assert run.divergences is not None
    with WIDE.style():
        figure = divergence.divergence_maps(WIDE, run.divergences)
        cells = meshes(figure)
    drawn = [axes for axes in figure.axes if axes.collections and axes.get_title("left")]
    assert [axes.get_title("left") for axes in drawn] == [
        f"{kind} divergence, {option}" for kind in ("loss", "weight") for option in ("fp8", "fp4")
    ]
    values = run.divergences.values("fp4", "loss_divergence")
    assert cells[1].ravel().tolist() == list(values.values())
    assert drawn[0].collections[0].norm is drawn[1].collections[0].norm


def test_the_loss_has_every_plan_change_and_event(run: RunRecord) -> None:
    with WIDE.style():
        axes = training.loss_curves(WIDE, [run]).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    steps, losses = run.metrics.column("loss")
    assert np.array_equal(lines["training"].get_xdata(), steps)
    assert np.array_equal(lines["training"].get_ydata(), losses)
    assert lines["validation"].get_xdata().tolist() == [0, 10, 20]
    changes = [span.start for span in run.plans if span.changed]
    marked = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert sorted(marked) == sorted([*changes, EVENT.step]) and changes


def test_several_losses_are_compared_with_the_first(run: RunRecord, by_gemm: RunRecord) -> None:
    with WIDE.style():
        upper, lower = training.loss_curves(WIDE, [run, by_gemm]).axes
    assert {text.get_text() for text in upper.get_legend().get_texts()} == {"run", "gemm"}
    difference = lower.lines[-1]
    assert difference.get_xdata().tolist() == list(range(16))  # the steps that both have
    assert np.allclose(difference.get_ydata(), 0.0)


def test_more_runs_than_colors_are_told_apart_by_their_lines(run: RunRecord) -> None:
    runs, frontier = [run] * 15, frontier_of(run)
    assert not isinstance(frontier, str)
    with WIDE.style():
        figures = (
            training.loss_curves(WIDE, runs),
            training.precision_share(WIDE, runs),
            time.step_seconds(WIDE, runs),
            pareto.pareto_curves(WIDE, [frontier] * 15),
        )
    for figure in figures:
        curves = [c for c in figure.axes[0].lines if not str(c.get_label()).startswith("_")]
        looks = {(curve.get_color(), curve.get_linestyle()) for curve in curves}
        assert len(looks) == len(curves) >= 15


def test_the_share_is_a_staircase_up_to_the_target(run: RunRecord) -> None:
    with HALF.style():
        axes = training.precision_share(HALF, [run]).axes[0]
    assert run.plan is not None
    line = axes.lines[0]
    assert line.get_ydata()[0] == 0.0 and line.get_ydata()[-1] == run.plan.efficiency
    assert line.get_xdata()[-1] == 24
    assert axes.lines[1].get_ydata()[0] == 0.6


def test_stages_are_bars_of_the_last_plan(run: RunRecord) -> None:
    assert run.plan is not None
    with HALF.style():
        axes = stages.stage_bars(HALF, run.plans, run.target).axes[0]
    assert [bar.get_height() for bar in axes.patches] == list(run.plan.stages)
    assert len(run.plan.stages) == 3


def test_the_frontier_rises_and_has_the_plan_on_it(run: RunRecord) -> None:
    found = frontier_of(run)
    assert not isinstance(found, str)
    with HALF.style():
        axes = pareto.pareto_curves(HALF, [found]).axes[0]
    curve, star = axes.lines
    losses = curve.get_ydata()
    assert len(losses) == 21 and all(np.diff(losses) >= -1e-12)
    assert run.plan is not None
    assert star.get_xdata()[0] == run.plan.efficiency
    # The plan in force was made from the last problem, so the frontier cannot lie above it.
    at_target = min(p.objective for p in found.points if p.objective and p.target >= 0.6)
    assert star.get_ydata()[0] == pytest.approx(at_target)


def test_time_is_stacked_and_the_solver_is_beside() -> None:
    with HALF.style():
        axes = time.time_bars(
            HALF, ["a"], [Phases(step=6.0, refresh=3.0, wait=1.0, solve=2.0)]
        ).axes[0]
    spans = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert spans == [(0.0, 6.0), (6.0, 3.0), (9.0, 1.0), (0.0, 2.0)]


def test_refreshes_are_marked_among_the_steps(run: RunRecord) -> None:
    with HALF.style():
        axes = time.step_seconds(HALF, [run]).axes[0]
    assert axes.lines[1].get_xdata().tolist() == [2, 10, 18]


@pytest.mark.parametrize("size", [1, 126])
def test_small_and_large_models_are_drawn(tmp_path: Path, size: int) -> None:
    names = [f"decoder.layers.{k}.mlp.linear_fc1" for k in range(size)]
    linears = dict.fromkeys(names, Option.uniform("fp4"))
    canvas = Canvas(348, LIGHT, narrow=True)
    with canvas.style():
        assert len(png(plan.plan_map(canvas, linears), canvas)) > 1000
