"""Time as the objective under Transformer Engine, with a clock of our own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

from megatron_snip.__main__ import main
from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import unmeasured_problem
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.linears import calibrate
from megatron_snip.linears.availability import AvailableOptions, available_options
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.runtime import MicrobatchTokens
from megatron_snip.linears.timed_options import timed_options
from megatron_snip.options import Option
from megatron_snip.planning.calibration import read_calibration
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.topology import Topology
from tests.models import BATCH, SEQUENCE, assignment, build, losses, planned, ran
from tests.te_on_cpu import probe

MS = 2**-10  # differences of its multiples are exact
SECONDS = {"bf16": 3 * MS, "mxfp8": 2 * MS, "nvfp4": MS}
MIXED_S = MS / 2
SLOW = (64, 64)
"""Shape of linear_proj: its NVFP4 GEMMs take four times as long as others."""
BF16, FP8, FP4 = map(Option.uniform, ("bf16", "fp8", "fp4"))
PROJ = {f"decoder.layers.{i}.self_attention.linear_proj" for i in range(2)}


class Clock:
    """A clock that only the GEMMs of Transformer Engine's linears advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.gemms = 0.0, 0
        original = tex.generic_gemm

        def timed_gemm(A: Any, transA: bool, B: Any, transB: bool, *args: Any, **kw: Any) -> Any:
            result = original(A, transA, B, transB, *args, **kw)
            self.add(probe.format_name(A), is_fprop=transA and not transB)
            return result

        monkeypatch.setattr(tex, "generic_gemm", timed_gemm)
        monkeypatch.setattr(calibrate.time, "perf_counter", lambda: self.now)

    def add(self, recipe: str, is_fprop: bool) -> None:
        self.gemms += 1
        module = probe.running_module()
        is_slow = tuple(module.weight.shape) == SLOW and recipe == "nvfp4"
        self.now += SECONDS[recipe] * (4.0 if is_slow else 1.0)
        quantizers = [*module.quantizers["scaling_fwd"], *module.quantizers["scaling_bwd"]]
        is_mixed = module.fp8 and any(isinstance(q, HybridQuantizer) for q in quantizers)
        self.now += MIXED_S if is_mixed and is_fprop else 0.0


def timed(cache: Path | None, **settings: Any) -> tuple[PlannedModel, AvailableOptions]:
    config = SnipConfig(cost="time", **{"formats": ("fp8", "fp4"), **settings})
    model = PlannedModel([build()], Topology(), 0, tokens=MicrobatchTokens(SEQUENCE * BATCH))
    _, available = available_options(config, model.job, model.refusals_of)
    return model, timed_options(available, model, config, cache)


def test_auto_measures_each_shape_once_and_keeps_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, cache = Clock(monkeypatch), tmp_path / "calibration.json"
    found = timed(cache, granularity="gemm")[1]
    table = read_calibration(cache)
    assert found.calibration == table and len(table.linears) == 4
    for entry in table.linears:
        slow = 4.0 if (entry.out_features, entry.in_features) == SLOW else 1.0
        wanted = {"bf16": 3 * MS, "fp8": 2 * MS, "fp4": slow * MS}
        assert entry.seconds == {
            n: dict.fromkeys(("fprop", "dgrad", "wgrad"), s) for n, s in wanted.items()
        }
        assert (entry.tokens, entry.mixed_s) == (32, MIXED_S)
    assert found.refusals[FP8] == {} and set(found.refusals[FP4]) == PROJ
    assert set(found.refusals[Option.parse("bf16-bf16-fp4")]) == PROJ
    gemms = clock.gemms
    assert timed(cache, granularity="gemm")[1].calibration == table and clock.gemms == gemms
    monkeypatch.setattr(calibrate, "installed_version", lambda _: "another")
    assert timed(cache, granularity="gemm")[1].calibration != table and clock.gemms == 2 * gemms
    build()  # which sets the seed
    after = torch.random.get_rng_state()
    timed(None)
    assert torch.equal(torch.random.get_rng_state(), after)


def test_the_command_measures_transformer_engine_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Clock(monkeypatch)
    path = tmp_path / "table.json"
    words = ["calibrate", "--linear", "*=96x64", "--tokens", "32", "--output", str(path)]
    assert main([*words, "--formats", "bf16,fp8,fp3"]) == 0
    (entry,) = read_calibration(path).linears
    assert entry.seconds == {
        name: dict.fromkeys(("fprop", "dgrad", "wgrad"), SECONDS[recipe])
        for name, recipe in (("bf16", "bf16"), ("fp8", "mxfp8"))
    }
    assert "left out fp3: fp3 on compute capability 10.0" in capsys.readouterr().out
    assert main([*words, "--formats", "fp3"]) == 2
    assert main([*words, "--formats", "bf16,fp4", "--linear", "*=24x64"]) == 0
    assert "left out fp4: features and tokens must be multiples of 32" in capsys.readouterr().out


@pytest.mark.parametrize("granularity", ["linear", "gemm"])
def test_plans_by_measured_time_take_the_seconds_of_the_table(
    monkeypatch: pytest.MonkeyPatch, granularity: str
) -> None:
    Clock(monkeypatch)
    pin = "*.0.self_attention.linear_proj", "fp4"  # may demand what is not faster
    model, found = timed(None, granularity=granularity, pins=("=".join(pin),))
    assert len(found.refusals[FP4]) == 1
    linears = model.job.linears
    problem = found.restrict(unmeasured_problem(linears, found.options, "fp4", 0.6))
    made = make_plan(problem, PlanSettings(cost="time", pins=(pin,))).linears
    table = found.calibration
    stage_and_flops = {i.name: (0, i.flops_per_token) for i in linears}
    assert table is not None
    seconds = sum(c.options[str(made[c.name])].seconds or 0.0 for c in problem.linears)
    assert table.slowest_stage(made, stage_and_flops) == pytest.approx(seconds)


def test_where_nothing_is_faster_time_cannot_be_the_objective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Clock(monkeypatch)
    monkeypatch.setitem(SECONDS, "bf16", MS / 2)
    with pytest.raises(UnsupportedError, match=r"no linear is faster than in bf16 .*cost flops"):
        timed(None)
    config = SnipConfig(cost="time")
    simulated = PlannedModel([build()], Topology(), 0, "simulate")
    _, available = available_options(config, simulated.job, simulated.refusals_of)
    with pytest.raises(UnsupportedError, match="never faster than bf16; give the seconds"):
        timed_options(available, simulated, config, None)


def test_what_cannot_be_measured_is_not_used_and_without_bf16_the_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Clock(monkeypatch)
    cache = tmp_path / "calibration.json"
    monkeypatch.setitem(SECONDS, "nvfp4", 0.0)
    found = timed(cache)[1]
    assert set(found.refusals[FP4].values()) == {"its seconds could not be measured"}
    assert found.refusals[FP8] == {}
    assert all(set(entry.seconds) == {"bf16", "fp8"} for entry in read_calibration(cache).linears)
    cache.write_text("{}")  # a damaged table is measured again
    monkeypatch.setitem(SECONDS, "bf16", 0.0)
    with pytest.raises(UsageError, match=r"in bf16 could not be measured: fprop came out at 0 ms"):
        timed(cache)
    assert cache.read_text() == "{}"


@pytest.mark.parametrize(("tensor", "parallel"), [(1, False), (2, False), (2, True)])
def test_tokens_that_a_recipe_cannot_take_are_found_before_training(
    tensor: int, parallel: bool
) -> None:
    model = build()
    model.config.tensor_model_parallel_size, model.config.sequence_parallel = tensor, parallel
    parts = tensor if parallel else 1
    config = SnipConfig(formats=("bf16", "fp8"))
    for tokens, fits in ((32 * parts, True), (24 * parts, False), (32 * parts + 16, False)):
        under = PlannedModel([model], Topology(), 0, tokens=MicrobatchTokens(tokens))
        assert all((linear.refusal(FP8) is None) == fits for linear in under.linears)
        if not fits:
            with pytest.raises(
                UnsupportedError, match=f"multiple of 32 tokens.*{tokens}"
            ) as caught:
                available_options(config, under.job, under.refusals_of)
            assert "--micro-batch-size or --seq-length" in str(caught.value)
            assert "\n" not in str(caught.value)


def test_what_is_refused_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.models.BATCH", 1)
    monkeypatch.setattr("tests.models.SEQUENCE", 24)
    model = build()
    under = planned(model, "fp8", tokens=MicrobatchTokens(24))
    with pytest.raises((AssertionError, RuntimeError, ValueError), match="divisible by"):
        losses(model)
    under.apply(assignment(under, "bf16"))
    losses(model)
    assert ran(under) == {("bf16",) * 3}
