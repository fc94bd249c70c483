"""Models of Transformer Engine's linears: the machine, the backend, options and plans."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.tensor import hybrid_tensor

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import ScaleType
from megatron_snip.linears.availability import AvailableOptions, available_options
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.runtime import MicrobatchTokens
from megatron_snip.linears.te.machine import Machine, this_machine
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.linears.te.refusals import te_refusal
from megatron_snip.log import forget_warnings
from megatron_snip.options import Option
from megatron_snip.planning.plan import assigned_plan, write_plan
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.run.controller import SnipController
from megatron_snip.topology import Topology
from tests.distributed.small_model import Memory
from tests.models import EXPERTS, assignment, build, by_name, losses, ours, planned, ran, resolved
from tests.te_on_cpu.capability import answers, forget

HOPPER, BLACKWELL = (9, 0), (10, 0)


BLOCKWISE, MXFP8 = ({name, f"{name}_hybrid"} for name in ("blockwise", "mxfp8"))
TENSORWISE = {name for name, each in RECIPES.items() if each.quantization.has_tensor_scale}


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Be on another GPU for the rest of the test."""
    for owner, name, value in answers(capability):
        monkeypatch.setattr(owner, name, value)
    forget()


@pytest.mark.parametrize(
    ("capability", "unavailable"),
    [
        ((8, 0), {*BLOCKWISE, *MXFP8, *TENSORWISE, "nvfp4"}),
        ((8, 9), {*BLOCKWISE, *MXFP8, "nvfp4"}),
        ((9, 0), {*MXFP8, "nvfp4"}),
        ((10, 0), set()),
        ((12, 0), {*MXFP8}),
    ],
)
def test_transformer_engine_is_queried(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], unavailable: set[str]
) -> None:
    on(monkeypatch, capability)
    machine = this_machine(with_te=True)
    assert (machine.capability, machine.te_version) == (capability, "2.20.2")
    assert set(machine.te_unavailable) == unavailable
    table = Machine(capability, "2.20.2")  # our table never has what Transformer Engine refuses
    for option in map(Option.uniform, ("fp8", "mxfp8", "fp4", "nvfp4")):
        assert (te_refusal(option, table) is None) == (te_refusal(option, machine) is None)


def test_an_older_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(quantization.FP8GlobalStateManager, "is_nvfp4_available")
    monkeypatch.delattr(hybrid_tensor, "HybridQuantizer")
    machine = this_machine(with_te=True)
    reason = "this Transformer Engine does not have the recipe"
    assert set(machine.te_unavailable) == {"nvfp4", "custom"}
    assert str(te_refusal(Option.uniform("fp4"), machine)).endswith(reason)
    found = available(build(), formats=("bf16", "mxfp8"), granularity="gemm")
    assert found.options == (Option.uniform("bf16"), Option.uniform("mxfp8"))
    assert len(found.warnings) == 6
    assert all("2.20.2 has no quantizers per GEMM" in text for text in found.warnings)


def test_a_missing_gpu_or_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        machine = this_machine(with_te=True)
        assert (machine.capability, machine.te_version) == (None, "2.20.2")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert this_machine(with_te=True) == this_machine(with_te=False) == Machine(BLACKWELL)


def test_a_linear_without_what_changes_its_precision_is_named() -> None:
    model = build()
    del model.decoder.layers[1].mlp.linear_fc2._fp8_workspaces
    wanted = r"layers\.1\.mlp\.linear_fc2: TERowParallelLinear has no _fp8_workspaces; SNIP needs"
    with pytest.raises(UnsupportedError, match=wanted):
        PlannedModel([model], Topology(), seed=0)


def test_the_backend_must_fit_the_linears() -> None:
    with pytest.raises(UnsupportedError, match="use --transformer-impl transformer_engine"):
        PlannedModel([build(te=False)], Topology(), 0, "te")
    for te, setting, backend in (
        (True, "auto", "te"),
        (True, "simulate", "simulate"),
        (False, "auto", "simulate"),
    ):
        under = PlannedModel([build(te=te)], Topology(), 0, setting)
        assert {linear.backend for linear in under.linears} == {backend}
        assert len(under.linears) == 8


def available(model: Any, tokens: int | None = 1024, **settings: Any) -> AvailableOptions:
    under = PlannedModel([model], Topology(), 0, tokens=MicrobatchTokens(tokens))
    return available_options(SnipConfig(**settings), under.job, under.refusals_of)[1]


def test_microbatches_of_varying_length_are_to_be_padded() -> None:
    assert not available(build(), formats=("bf16", "mxfp8")).warnings
    (text,) = available(build(), tokens=None, formats=("bf16", "mxfp8")).warnings
    assert "vary in length: pad each of them to a multiple of 32 tokens on each rank" in text


@pytest.mark.parametrize(
    ("capability", "formats", "tiles"),
    [
        (HOPPER, ("bf16", "fp8"), {"fp8": (128, (128, 128), 0)}),
        (BLACKWELL, ("fp8", "fp4"), {"fp8": (32, (1, 32), 0), "fp4": (16, (16, 16), 16)}),
    ],
)
def test_auto_takes_what_the_machine_runs_and_measures_it(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    formats: tuple[str, ...],
    tiles: dict[str, Any],
) -> None:
    on(monkeypatch, capability)
    model = build()
    config = resolved(model)
    assert config.formats == formats
    measured = PlannedModel([model], Topology(), 0).measured_formats(formats)
    found = {n: (f.tile, f.weight_block, f.wgrad_hadamard) for n, f in measured.items()}
    assert found == tiles
    assert all(f.scale is not ScaleType.FP32 for f in measured.values())


def test_auto_without_low_precision_gemms_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, (8, 0))
    with pytest.raises(UnsupportedError, match="--snip-backend simulate for fp8,fp4"):
        resolved(build())
    assert resolved(build(te=False)).formats == ("fp8", "fp4")


def test_simulation_in_a_quantized_run_says_what_bf16_is(caplog: pytest.LogCaptureFixture) -> None:
    """Such a linear is left to Megatron, whose autocast quantizes it."""
    for flags in ({}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}):
        caplog.clear()
        resolved(build(**flags), backend="simulate")
        wanted = "what a plan leaves in bf16 runs that instead, in evaluations too; drop --fp8-form"
        assert (wanted in caplog.text) == bool(flags)


def test_a_lowest_precision_that_the_machine_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, HOPPER)
    with pytest.raises(UnsupportedError, match=r"no linear of this model can run fp4.*9\.0"):
        available(build(), formats=("fp8", "fp4"))
    bf16, fp8 = map(Option.uniform, ("bf16", "fp8"))
    assert available(build(), formats=("bf16", "fp8")).options == (bf16, fp8)


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_need_a_run_that_pads_their_tokens(grouped: bool) -> None:
    """Megatron pads an expert's tokens only where the run quantizes by default."""
    mxfp8, nvfp4 = map(Option.uniform, ("mxfp8", "nvfp4"))
    found = available(build(grouped=grouped, **EXPERTS), formats=("mxfp8", "nvfp4"))
    experts = {f"decoder.layers.{i}.mlp.experts.linear_fc{j}" for i in range(2) for j in (1, 2)}
    assert set(found.refusals[nvfp4]) == set(found.refusals[mxfp8]) == experts
    assert len(found.warnings) == 2
    assert all("to 4 linears" in text and "--fp8-format" in text for text in found.warnings)
    padded = build(grouped=grouped, fp8="e4m3", fp8_recipe="mxfp8", **EXPERTS)
    found = available(padded, formats=("bf16", "mxfp8"))
    assert not found.refusals[mxfp8] and not found.warnings
    under = planned(padded, "mxfp8")
    losses(padded)
    assert ran(under) == {("mxfp8",) * 3}


def test_a_run_that_ends_before_its_first_refresh_warns(caplog: pytest.LogCaptureFixture) -> None:
    config = SnipConfig(start_step=100, backend="simulate")
    for train_iters in (99, 100):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "megatron_snip"):
            run = SnipController(
                config, [build()], None, topology=Topology(), train_iters=train_iters
            )
        run.close()
        warned = "--snip-start-step is 100, and the run has 99" in caplog.text
        assert warned == (train_iters < 100)


DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
MIXED = "fp4-fp8-bf16"
FELL_BACK = "linears run fp8 instead of fp4"


@pytest.mark.parametrize(
    ("capability", "formats", "option", "runs", "label", "warning"),
    [
        (BLACKWELL, ("bf16", "fp8", "fp4"), MIXED, MIXED, "custom(nvfp4, mxfp8, bf16)", ""),
        (HOPPER, ("bf16", "fp8"), "fp4", "fp8", "blockwise", FELL_BACK),
    ],
    ids=["Blackwell", "Hopper"],
)
def test_a_plan_file_runs_as_the_machine_can(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    formats: tuple[str, ...],
    option: str,
    runs: str,
    label: str,
    warning: str,
) -> None:
    """And the run directory records what runs."""
    on(monkeypatch, capability)
    model, path = build(), tmp_path / "plan.json"
    under = PlannedModel([model], Topology(), seed=0)
    stage_and_flops = {i.name: (i.stage, i.flops_per_token) for i in under.job.linears}
    write_plan(assigned_plan(assignment(under, option), stage_and_flops, "fp4", "snip"), path)
    config = SnipConfig(
        collect_only=True, start_step=1000, plan_file=path, formats=formats, granularity="gemm"
    )
    writers = [RunDirectory(tmp_path / "run")]
    with caplog.at_level(logging.WARNING, "megatron_snip"):
        run = SnipController(
            config,
            [model],
            None,
            writers=writers,
            topology=Topology(),
            tokens=MicrobatchTokens(1024),
        )
    assert set(map(str, run.plan.linears.values())) == {runs}
    assert len(ours(caplog)) == bool(warning) and warning in caplog.text
    losses(model)
    recipes = ("nvfp4", "mxfp8", "bf16") if option == MIXED else ("blockwise",) * 3
    assert ran(run.model) == {recipes}
    run.close()
    losses(model)
    assert all(module.seen[-1] == ("bf16",) * 3 for module in by_name(run.model).values())
    (file,) = (tmp_path / "run" / "precision").iterdir()
    rows = json.loads(file.read_text())["linears"]
    assert [row.pop("name") for row in rows] == list(run.plan.linears)
    wanted = {"option": runs, "recipe": label, "backend": "te", "weight_storage": "bfloat16"}
    wanted |= {"fixed": None}
    assert all(row == wanted for row in rows)


def test_a_plan_file_of_a_run_with_another_fp8_recipe_says_what_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, whether the plan comes as a file or in the state of the stopped run."""

    def start(
        fp8_recipe: str, plan_file: Path | None, state: Any = None
    ) -> tuple[SnipController, list[str]]:
        caplog.clear()
        forget_warnings()
        config = SnipConfig(
            formats=("bf16", "fp8"),
            policy="uniform-fp8",
            collect_only=plan_file is not None,
            start_step=1000,
            plan_file=plan_file,
        )
        writers = [RunDirectory(tmp_path / f"{fp8_recipe}-{plan_file is None}-{state is None}")]
        model = build(fp8="hybrid", fp8_recipe=fp8_recipe)
        with caplog.at_level(logging.WARNING, "megatron_snip"):
            run = SnipController(
                config, [model], None, writers=writers, topology=Topology(), state=state
            )
        run.close()
        return run, [record.getMessage() for record in ours(caplog)]

    first, _ = start("delayed", None)
    (file,) = (tmp_path / "delayed-True-True" / "plans").iterdir()
    _, same = start("delayed", file)
    assert not any("delayed" in text for text in same)
    second, lines = start("tensorwise", file)
    assert {linear.recipe for linear in second.model.linears} == {"tensorwise_hybrid"}
    changed = f"fp8 was delayed_hybrid in the run of '{file}', and is tensorwise_hybrid here"
    assert [changed in text for text in lines if "delayed" in text] == [True]
    _, lines = start("tensorwise", None, first.state(0))
    wanted = "recipe of fp8 delayed_hybrid -> tensorwise_hybrid"
    assert [wanted in text for text in lines if "delayed" in text] == [True]


@pytest.mark.parametrize(
    ("job", "config", "num_changed"),
    [
        ({}, {}, None),
        ({}, {"collect_only": True}, 0),
        ({}, {"policy": "uniform-fp8"}, 8),
        (DELAYED, {}, 0),
        (DELAYED, {"collect_only": True}, 0),
        (DELAYED, {"policy": "uniform-fp8"}, 0),
        (DELAYED, {"pins": ("decoder.layers.0.*=bf16",), "efficiency_target": 0.5}, 4),
        (DELAYED, {"policy": "uniform-bf16", "efficiency_target": 0.0}, 8),
    ],
)
def test_the_first_plan_changes_what_the_job_itself_runs(
    job: dict[str, str], config: dict[str, Any], num_changed: int | None
) -> None:
    """In a BF16 job whose first plan changes nothing and which is to plan, it is not reported."""
    settings = SnipConfig(**{"formats": ("bf16", "fp8"), "start_step": 1000, **config})
    writer = Memory()
    run = SnipController(settings, [build(**job)], None, writers=[writer], topology=Topology())
    run.close()
    wanted = [] if num_changed is None else [(1, num_changed)]
    assert [(at, applied.num_changed) for at, applied in writer.applied] == wanted
