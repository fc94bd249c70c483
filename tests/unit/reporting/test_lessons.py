"""The lines at the end of a training."""

from pathlib import Path

from megatron_snip.planning.problem import read_problem
from megatron_snip.reporting.lessons import lessons
from megatron_snip.reporting.run_record import read_run
from tests.unit.reporting.runs import Shape, config, write_run


def test_the_worst_linears_and_the_plan_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, Shape(config(start_step=3), iterations=16))
    run = read_run(tmp_path)
    fragile, plan = lessons(run)
    files = sorted((tmp_path / "problems").glob("*.json"), key=lambda path: int(path.stem))
    problem = read_problem(files[-1])
    losses = {each.name: each.options["fp4"].quality_loss or 0.0 for each in problem.linears}
    worst = max(losses, key=lambda name: losses[name])
    share = 100 * losses[worst] / sum(losses.values())
    assert fragile.startswith("most fragile in fp4, by share of the quality loss: " + worst)
    assert f"{worst} {share:.3g}%" in fragile and fragile.count("%") == 3
    assert run.plan is not None
    assert f"{100 * run.plan.efficiency:.3g}% of the FLOPs in fp4" in plan


def test_a_run_that_has_turned_snip_off_has_no_plan(tmp_path: Path) -> None:
    write_run(tmp_path, Shape(config(start_step=3), iterations=16))
    settings = tmp_path / "config.yaml"
    text = settings.read_text()
    assert text.count("enabled: true") == 1
    settings.write_text(text.replace("enabled: true", "enabled: false"))
    assert [line.partition(" ")[0] for line in lessons(read_run(tmp_path))] == ["most"]


def test_a_run_in_bf16_has_none(tmp_path: Path) -> None:
    write_run(tmp_path, Shape(config(enabled=False), iterations=4))
    assert lessons(read_run(tmp_path)) == []
