import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_snip.formats import FORMATS
from megatron_snip.linears import calibrate
from megatron_snip.linears.calibrate import TimedLinear, TimedShape, measure
from megatron_snip.options import Option
from megatron_snip.planning.calibration import read_calibration
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import write_problem
from tests.processes import run_python
from tests.unit.planning.build import options_of, problem_of

QUICK = ["--seconds", "1e-6"]


def test_every_format_is_measured_at_every_shape(tmp_path: Path, printed: Any) -> None:
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


def test_quantizing_x_for_wgrad_counts_as_wgrad(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear does it in the forward, unless its weight is frozen; with a clock of our own."""
    now = 0.0

    def add(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            add(1.0)
            return x.new_zeros(len(x), len(weight))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
            add(2.0)  # dX
            has_wgrad = ctx.needs_input_grad[1]
            add(4.0 if has_wgrad else 0.0)
            return torch.zeros(8, 4), torch.zeros(6, 4) if has_wgrad else None

    def linear(shape: TimedShape, option: Option, x: Tensor) -> TimedLinear:
        weight = torch.zeros(shape.out_features, shape.in_features, requires_grad=True)

        def forward() -> Tensor:
            add(0.5 if weight.requires_grad else 0.0)
            y: Tensor = Product.apply(x, weight)  # type: ignore[no-untyped-call]
            return y

        return forward, weight

    monkeypatch.setattr(calibrate, "simulated_linear", linear)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: now)
    shape = TimedShape(out_features=6, in_features=4, tokens=8, norm="", options="fp8")
    found = measure(shape, None, torch.device("cpu"), budget_s=1e-6)
    assert found.seconds["fp8"] == {"fprop": 1.0, "dgrad": 2.0, "wgrad": 4.5}


def test_a_table_serves_planning_by_time(tmp_path: Path, printed: Any) -> None:
    table, problem = tmp_path / "table.json", tmp_path / "problem.json"
    words = ["--linear", "*=128x128", "--formats", "fp8,fp4", "--tokens", 32]
    printed("calibrate", *words, *QUICK, "--output", table)
    write_problem(problem_of([[0.0, 1.0], [0.0, 2.0]]), problem)
    plan = printed("plan", problem, "--cost", "time", "--calibration", table, "--json")
    assert PrecisionPlan.from_dict(json.loads(plan)).efficiency >= 0.5


def test_seconds_of_bf16_serve_its_pins(tmp_path: Path, printed: Any) -> None:
    """Those of the run too: a problem of a run whose target counts FLOPs does not list bf16."""
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
    tmp_path: Path, printed: Any
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
