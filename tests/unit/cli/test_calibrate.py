import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_snip.__main__ import main
from megatron_snip.formats import FORMATS
from megatron_snip.linears import calibrate
from megatron_snip.linears.calibrate import TimedShape, measure
from megatron_snip.options import Option
from megatron_snip.planning.calibration import read_calibration
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import write_problem
from tests.processes import run_python
from tests.unit.planning.build import options_of, problem_of
from tests.unit.timed_machine import MS, Machine

QUICK = ["--seconds", "1e-6"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


SHAPE = TimedShape(out_features=6, in_features=4, tokens=8, norm="", options="bf16,fp8")
CPU = torch.device("cpu")


def test_every_format_runs_forward_and_backward() -> None:
    for name in FORMATS:
        x = torch.randn(32, 64).bfloat16().requires_grad_()
        shape = TimedShape(out_features=32, in_features=64, tokens=32, norm="", options=name)
        forward, weight = calibrate.simulated_linear(shape, Option.uniform(name), x)
        y = forward()
        gradients = torch.autograd.grad(y, [x, weight], torch.randn_like(y))
        assert all(each.isfinite().all() and each.any() for each in (y, *gradients))


def test_every_format_is_measured_at_every_shape(
    tmp_path: Path, printed: Any, machine: Machine
) -> None:
    path = tmp_path / "table.json"
    shapes = ["--linear", "*.linear_fc1=256x128", "--linear", "*.linear_fc2=128x128"]
    text = printed("calibrate", *shapes, "--tokens", 64, *QUICK, "--output", path)
    table = read_calibration(path)
    assert [(e.names, e.out_features, e.in_features) for e in table.linears] == [
        ("*.linear_fc1", 256, 128),
        ("*.linear_fc2", 128, 128),
    ]
    assert (table.tokens, table.device) == (64, "cpu")
    assert table.machine and "torch" in table.versions
    assert all(set(entry.seconds) == set(FORMATS) for entry in table.linears)
    assert "nvfp4" in text and "64 tokens" in text


def test_no_option_is_warmed_up_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Option] = []
    clock = iter(range(1_000_000))
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: float(next(clock)))
    simulated = calibrate.simulated_linear

    def counted(shape: TimedShape, option: Option, x: Any) -> Any:
        made.append(option)
        return simulated(shape, option, x)

    monkeypatch.setattr(calibrate, "simulated_linear", counted)
    shape = SHAPE._replace(options="bf16,fp8,fp4,mxfp8")
    found = measure(shape, None, CPU, budget_s=1e6, limit_s=10.0)
    assert len(made) < 4 and "the time limit came before" in next(iter(found.refused.values()))


def test_quantizing_x_for_wgrad_counts_as_wgrad(machine: Machine) -> None:
    """A linear does it in the forward, unless its weight is frozen."""
    found = measure(SHAPE, None, CPU, budget_s=1e-6).linear
    assert found is not None
    assert found.seconds["fp8"] == {"fprop": MS, "dgrad": 2 * MS, "wgrad": 4.5 * MS}


def test_runs_alternate_so_that_other_work_slows_all_options(machine: Machine) -> None:
    """For the first half of the time everything takes 10 ms more."""
    machine.disturbance = lambda run: 10 * MS if machine.now < 600 * MS else 0.0
    found = measure(SHAPE, None, CPU, budget_s=500 * MS)
    assert found.linear is not None and not found.problems()
    assert found.linear.seconds["bf16"] == found.linear.seconds["fp8"]
    assert found.linear.seconds["bf16"] == {"fprop": MS, "dgrad": 2 * MS, "wgrad": 4.5 * MS}


def test_a_difference_that_is_not_above_zero_is_no_time(
    tmp_path: Path, printed: Any, machine: Machine
) -> None:
    machine.seconds = (MS, 0.0, 4 * MS, MS / 2)
    found = measure(SHAPE, None, CPU, budget_s=1e-6)
    assert found.linear is None
    assert all("dgrad came out at 0 ms" in why for why in found.refused.values())
    path = tmp_path / "table.json"
    words = ["--linear", "*=64x32", "--formats", "bf16,fp8", "--output", path]
    assert printed("calibrate", *words, *QUICK, status=1) == ""
    assert not path.exists()


def test_seconds_that_other_work_may_have_changed_are_reported(machine: Machine) -> None:
    """The forward of every second run takes longer, so the halves of the runs differ."""
    machine.seconds = (2 * MS, 20 * MS, 20 * MS, 0.0)
    machine.disturbance = lambda run: 3 * MS if (run - 1) // 6 % 2 == 0 else 0.0
    found = measure(SHAPE, None, CPU, budget_s=1e-6)
    assert found.linear is not None
    assert found.unsteady == {"bf16": 1.5, "fp8": 1.5}
    assert "bf16, fp8: two halves of the runs differ by up to 150%" in found.problems()[0]


def test_measuring_ends_with_the_time_limit(machine: Machine) -> None:
    """A run takes 11.5 ms by the machine's clock."""
    found = measure(SHAPE, None, CPU, budget_s=1e6, limit_s=200 * MS)
    assert found.linear is not None and not found.refused
    assert machine.now < 230 * MS
    found = measure(SHAPE, None, CPU, budget_s=1e6, limit_s=60 * MS)
    assert found.linear is None
    assert "the time limit came before 4 runs" in found.refused["fp8"]


def test_there_is_a_line_for_each_shape(
    tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--linear", "*.a=64x32", "--linear", "*.b=32x32", "--formats", "bf16,fp8"]
    assert main(["calibrate", *words, *QUICK, "--output", str(tmp_path / "table.json")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" in ")[0] for line in lines] == [
        "1 of 2: *.a, 64 x 32: 2 formats",
        "2 of 2: *.b, 32 x 32: 2 formats",
    ]


def test_a_table_serves_planning_by_time(tmp_path: Path, printed: Any, machine: Machine) -> None:
    machine.share = lambda option: option.bits / 48
    table, problem = tmp_path / "table.json", tmp_path / "problem.json"
    words = ["--linear", "*=128x128", "--formats", "fp8,fp4", "--tokens", 32]
    printed("calibrate", *words, *QUICK, "--output", table)
    write_problem(problem_of([[0.0, 1.0], [0.0, 2.0]]), problem)
    plan = printed("plan", problem, "--cost", "time", "--calibration", table, "--json")
    assert PrecisionPlan.from_dict(json.loads(plan)).efficiency >= 0.5


def test_seconds_of_bf16_serve_its_pins(tmp_path: Path, printed: Any, machine: Machine) -> None:
    """Those of the run too: a problem of a run whose target counts FLOPs does not list bf16."""
    machine.share = lambda option: option.bits / 48
    table, file = tmp_path / "table.json", tmp_path / "problem.json"
    words = ["--linear", "*=128x128", "--formats", "bf16,fp8,fp4", "--tokens", 32]
    printed("calibrate", *words, *QUICK, "--output", table)
    problem = problem_of([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    pins = (("*.layers.0.*", "bf16"),)
    write_problem(problem.model_copy(update={"pins": pins}), file)
    words = [file, "--cost", "time", "--calibration", table, "--target", 0]
    plan = printed("plan", *words, "--pin", "*.layers.2.*=bf16", "--json")
    options = options_of(PrecisionPlan.from_dict(json.loads(plan)))
    assert [option == "bf16" for option in options] == [True, False, True]


def test_shapes_come_from_a_training_config_as_a_rank_holds_them(
    tmp_path: Path, printed: Any, machine: Machine
) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(
        "num_layers: 2\nhidden_size: 256\nffn_hidden_size: 512\nnum_attention_heads: 4\n"
        "num_query_groups: 2\nseq_length: 32\nmicro_batch_size: 2\nglobal_batch_size: 2\n"
        "tensor_model_parallel_size: 2\n"
    )
    path = tmp_path / "table.json"
    words = ["--config", config, "--formats", "bf16", *QUICK, "--output", path]
    printed("calibrate", *words)
    table = read_calibration(path)
    assert table.tokens == 64
    assert {e.names: (e.out_features, e.in_features) for e in table.linears} == {
        "*.self_attention.linear_qkv": (256, 256),  # (4 + 2 * 2) heads of 64, halved
        "*.self_attention.linear_proj": (256, 128),
        "*.mlp.linear_fc1": (512, 256),
        "*.mlp.linear_fc2": (256, 256),
    }


def test_what_megatron_warns_of_is_not_shown(refused: Any) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        refused("calibrate", "--linear", "x=12", "--output", "t.json")
        for module in ("megatron.core.utils", "another"):
            warnings.warn_explicit(f"of {module}", UserWarning, "file.py", 1, module=module)
    texts = {str(each.message) for each in shown}
    assert texts & {"of megatron.core.utils", "of another"} == {"of another"}


@pytest.mark.slow
def test_a_bad_shape_is_one_line_beside_what_megatron_tells() -> None:
    """In a process of its own, whose imports would print warnings and log lines."""
    words = ("calibrate", "--linear", "x=12", "--output", "t.json")
    done = run_python("-m", "megatron_snip", *words, PYTHONWARNINGS="default::UserWarning")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "'x=12' is not GLOB=OUTxIN" in done.stderr
