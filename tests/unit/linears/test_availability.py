"""What can run: the table by backend and machine, options of a model, plans that must change."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.formats import FORMATS
from megatron_snip.linears.availability import AvailableOptions, available_options
from megatron_snip.linears.job import Job
from megatron_snip.linears.te.machine import (
    Machine,
    conflicting_variables,
    measured_format,
    te_recipe,
    te_support,
    this_machine,
    unmeasured_variables,
)
from megatron_snip.linears.te.recipe_table import RECIPES, JobPrecision
from megatron_snip.linears.te.refusals import te_refusal
from megatron_snip.log import forget_warnings
from megatron_snip.options import BF16, Option, Refusals, enumerate_options, nearest_option
from megatron_snip.topology import LinearInfo
from tests.unit.planning.build import name_of, problem_of

AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER = (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)
FP8, FP4, NVFP4, MXFP8 = map(Option.uniform, ("fp8", "fp4", "nvfp4", "mxfp8"))
A, B, C = (f"decoder.layers.{i}.mlp.linear_fc1" for i in range(3))


def te(capability: tuple[int, int] | None, **changes: Any) -> Machine:
    return Machine(capability, **{"te_version": "2.20.2", **changes})


@pytest.mark.parametrize(
    ("fmt", "recipes"),
    [
        ("bf16", ["bf16"] * 5),
        ("fp8", [None, "tensorwise_hybrid", "blockwise", "mxfp8", "tensorwise_hybrid"]),
        ("fp8_tensorwise", [None, *["tensorwise"] * 4]),
        ("fp8_blockwise", [None, None, "blockwise", None, None]),
        ("mxfp8", [None, None, None, "mxfp8", None]),
        ("fp4", [None, None, None, "nvfp4", "nvfp4"]),
        ("nvfp4", [None, None, None, "nvfp4", "nvfp4"]),
        ("nvfp4_2d_rht", [None, None, None, "nvfp4", "nvfp4"]),
        ("mxfp4", [None] * 5),
        ("fp3", [None] * 5),
    ],
)
def test_recipes_of_transformer_engine_by_gpu(fmt: str, recipes: list[str | None]) -> None:
    option = Option.uniform(fmt)
    for capability, recipe in zip((AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER), recipes, strict=True):
        machine = te(capability)
        assert (te_refusal(option, machine) is None) == (recipe is not None)
        if recipe is not None:
            assert te_recipe(option, machine) == (recipe, recipe, recipe)


@pytest.mark.parametrize("capability", [None, (7, 5), AMPERE, HOPPER, BLACKWELL, CONSUMER])
def test_an_option_is_refused_if_and_only_if_one_of_its_formats_is(
    capability: tuple[int, int] | None,
) -> None:
    machine = te(capability)
    runs = {name for name in FORMATS if te_refusal(Option.uniform(name), machine) is None}
    assert "bf16" in runs and (capability is not None or runs == {"bf16"})
    for option in enumerate_options(tuple(FORMATS), "gemm"):
        assert (te_refusal(option, machine) is None) == (set(option.formats) <= runs)


RUNS = [
    (JobPrecision(kind, number_format, recipe), name)
    for kind, number_format, recipe, name in (
        ("fp8", "e4m3", "tensorwise", "tensorwise"),
        ("fp8", "hybrid", "tensorwise", "tensorwise_hybrid"),
        ("fp8", "e4m3", "delayed", "delayed"),
        ("fp8", "hybrid", "delayed", "delayed_hybrid"),
        ("fp8", "e4m3", "blockwise", "blockwise"),
        ("fp8", "hybrid", "blockwise", "blockwise_hybrid"),
        ("fp8", "e4m3", "mxfp8", "mxfp8"),
        ("fp8", "hybrid", "mxfp8", "mxfp8_hybrid"),
    )
]


@pytest.mark.parametrize(("run", "recipe"), RUNS, ids=[name for _, name in RUNS])
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_fp8_is_the_recipe_that_the_run_has(
    run: JobPrecision, recipe: str, capability: tuple[int, int]
) -> None:
    """Transformer Engine itself refuses what the GPU cannot run; a format by name stays itself."""
    machine = te(capability, job=run)
    assert te_recipe(FP8, machine) == (recipe, recipe, recipe)
    assert te_recipe(Option.uniform("fp8_tensorwise"), machine).fprop == "tensorwise"
    text = te_support("fp8", machine)[1]
    assert text.startswith(f"the job's own {recipe} recipe: ")
    assert ("E5M2" in text) == (run.format == "hybrid")
    broken = te(capability, job=run, te_unavailable={recipe: "CUDA is too old"})
    assert str(te_refusal(FP8, broken)).endswith("CUDA is too old")
    assert te_refusal(FP8, Machine(None, job=run)) is not None


def test_a_refusal_names_every_gpu_that_has_a_recipe_of_the_format() -> None:
    where = " need a GPU of compute capability "
    assert te_support("fp8", Machine())[1] == f"FP8 GEMMs{where}8.9 or 9.0 or 10.x or 12.x"
    for name in FORMATS:
        gpus = {gpu for recipe in RECIPES.values() if name in recipe.formats for gpu in recipe.gpus}
        if gpus:
            assert set(te_support(name, Machine())[1].split(where)[1].split(" or ")) == gpus


def test_delayed_scaling_is_one_recipe_for_the_linear() -> None:
    machine = te(BLACKWELL, job=JobPrecision("fp8", "hybrid", "delayed"))
    refusal = te_refusal(Option.parse("fp8-fp8-fp4"), machine)
    assert refusal == "fp8-fp8-fp4: delayed_hybrid takes one recipe for all three GEMMs of a linear"
    assert te_refusal(Option.parse("mxfp8-mxfp8-fp4"), machine) is None


def test_an_fp4_run_and_a_custom_recipe_leave_fp8_to_the_machine() -> None:
    for run in (JobPrecision("fp4", "e2m1", "nvfp4"), JobPrecision("fp8", "e4m3", "custom")):
        assert te_recipe(FP8, te(HOPPER, job=run)).fprop == "blockwise"


def test_settings_of_the_environment_are_measured_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = te(BLACKWELL)
    for name, value in (
        ("NVTE_NVFP4_DISABLE_RHT", "1"),
        ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1"),
        ("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1"),
        ("NVTE_NVFP4_4OVER6", "none"),
    ):
        monkeypatch.setenv(name, value)
    measured = measured_format("fp4", "te", machine)
    assert (measured.wgrad_hadamard, measured.weight_block) == (0, (1, 16))
    assert not measured.stochastic_grad
    assert "no rotation (NVTE_NVFP4_DISABLE_RHT)" in te_support("fp4", machine)[1]
    assert unmeasured_variables(["bf16", "fp8", "fp4"], machine) == []
    assert conflicting_variables(machine) == []
    monkeypatch.setenv("NVTE_NVFP4_4OVER6", "all")
    (line,) = unmeasured_variables(["bf16", "fp8", "fp4", "nvfp4"], machine)
    assert line.startswith("NVTE_NVFP4_4OVER6=all (")
    assert "the statistics of nvfp4 are those without it" in line
    simulated = measured_format("fp4", "simulate", machine)
    assert simulated == FORMATS["fp4"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NVTE_NVFP4_4OVER6", "all"),
        ("NVTE_NVFP4_4OVER6", "activations"),
        ("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "1"),
    ],
)
def test_a_setting_that_excludes_the_rotation_needs_it_off(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """Transformer Engine raises in the first forward; tests/te_on_cpu/test_nvfp4.py has that."""
    machine = te(BLACKWELL)
    monkeypatch.setenv(variable, value)
    refusal = str(te_refusal(FP4, machine))
    assert f"{variable}={value} (" in refusal
    assert refusal.endswith("runs only with NVTE_NVFP4_DISABLE_RHT=1")
    (line,) = conflicting_variables(machine)
    assert line.startswith(f"nvfp4 cannot run: {variable}={value} (")
    assert te_refusal(FP8, machine) is None and conflicting_variables(te(HOPPER)) == []
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    assert te_refusal(FP4, machine) is None and conflicting_variables(machine) == []


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_what_runs_in_bf16_counts_as_bf16(override: str) -> None:
    """NVTE_BACKWARD_OVERRIDE leaves fprop alone in the recipe."""
    machine = te(BLACKWELL, backward_override=override)
    refusal = str(te_refusal(FP8, machine))
    assert refusal.startswith(
        f"fp8: NVTE_BACKWARD_OVERRIDE={override} runs dgrad and wgrad in BF16"
    )
    assert refusal.endswith("; fp8-bf16-bf16 says so")
    runs = Option.parse("fp8-bf16-bf16")
    assert te_refusal(BF16, machine) is te_refusal(runs, machine) is None
    assert te_recipe(runs, machine) == ("mxfp8",) * 3  # whose backward Transformer Engine changes
    assert te_recipe(runs, te(BLACKWELL)) == ("mxfp8", "bf16", "bf16")
    assert "NVTE_BACKWARD_OVERRIDE" in te_support("fp8", machine)[1]
    unmeasured = unmeasured_variables(["fp8"], machine)
    assert len(unmeasured) == (override == "dequantized")


def test_delayed_scaling_runs_without_a_backward_override_alone() -> None:
    """Transformer Engine's DelayedScaling raises an error with any other value."""
    machine = te(HOPPER, job=RECIPES["delayed"].precision, backward_override="high_precision")
    refusal = str(te_refusal(Option("fp8", "bf16", "bf16"), machine))
    assert refusal.endswith("delayed scaling runs only without NVTE_BACKWARD_OVERRIDE; unset it")
    (line,) = conflicting_variables(machine)
    assert line.startswith("delayed cannot run: ")
    assert te_refusal(Option("fp8_tensorwise", "bf16", "bf16"), machine) is None


def test_transformer_engine_s_own_refusal_counts() -> None:
    machine = te(HOPPER, te_unavailable={"blockwise": "CUDA 12.9 is needed"})
    assert te_refusal(FP8, machine) == "fp8 on compute capability 9.0: CUDA 12.9 is needed"
    assert "cannot be imported" in str(te_refusal(FP8, te(BLACKWELL, te_version=None)))
    assert te_refusal(BF16, te(BLACKWELL, te_version=None)) is None
    older = te(BLACKWELL, te_unavailable={"custom": "has no quantizers per GEMM"})
    mixed, same = Option.parse("nvfp4-mxfp8-bf16"), Option.parse("fp4-nvfp4-nvfp4")
    assert "2.20.2 has no quantizers per GEMM" in str(te_refusal(mixed, older))
    assert te_refusal(same, older) is None  # two formats that run as one recipe


def available(refused: Mapping[str, str | None], **settings: Any) -> AvailableOptions:
    """What linears can run that each refuse one option, or none."""
    infos = tuple(LinearInfo(name, 0, 1, 1, 1.0) for name in refused)

    def refusals_of(options: Iterable[Option]) -> Refusals:
        found: dict[Option, dict[str, str]] = {option: {} for option in options}
        for name, refusal in refused.items():
            if refusal is not None:
                option, why = refusal.split(": ")
                found[Option.parse(option)][name] = why
        return found

    job = Job(dict.fromkeys(refused, BF16), linears=infos)
    return available_options(SnipConfig(**settings), job, refusals_of)[1]


@pytest.mark.parametrize(
    ("linears", "options", "warnings"),
    [
        ({A: None, B: None}, (FP8, FP4), ()),
        (
            {A: "fp8: needs 9.0", B: "fp8: needs 9.0"},
            (FP4,),
            ("fp8 is not available to any linear: needs 9.0",),
        ),
        (
            {**{f"{A}{i}": f"fp8: why {i // 2}" for i in range(10)}, B: None},
            (FP8, FP4),
            ("fp8 is not available to 10 linears: why 0; why 1; why 2 and 2 other reasons",),
        ),
    ],
    ids=["every linear", "none", "some, with few of the reasons"],
)
def test_an_option_stays_if_some_linear_runs_it(
    linears: dict[str, str | None], options: tuple[Option, ...], warnings: tuple[str, ...]
) -> None:
    found = available(linears)
    assert (found.options, found.warnings) == (options, warnings)


def test_runs_that_only_measure_have_all_options() -> None:
    assert available({A: "fp4: no"}, collect_only=True).options == (FP8, FP4)


def test_the_nearest_option_has_the_fewest_bits_with_enough_in_every_gemm() -> None:
    mixed, forward = Option.parse("fp4-fp8-bf16"), Option.parse("fp8-fp4-fp4")
    for option, candidates, wanted in (
        (FP4, (NVFP4, FP4), FP4),
        (FP4, (NVFP4, MXFP8), NVFP4),
        (MXFP8, (FP8, BF16), FP8),
        (FP4, (BF16, mixed, FP8), FP8),  # 24 bits, `mixed` has 28
        (mixed, (FP8,), BF16),
        (forward, (FP4, mixed, FP8), FP8),
        (FP4, (FP8, forward), forward),
        (FP8, (), BF16),
    ):
        assert nearest_option(option, candidates) == wanted


def test_a_restricted_problem_lists_what_each_linear_runs() -> None:
    first, second = map(name_of, range(2))
    refusals = {FP4: {first: "no", second: "no"}, FP8: {second: "no"}}
    full = problem_of([[0.0, 0.0]] * 3, 0.5, stages=[0, 1, 1], flops=[1.0, 1.0, 2.0])
    problem = AvailableOptions((FP8, FP4), refusals).restrict(full)
    assert [list(row.options) for row in problem.linears] == [["fp8"], ["bf16"], ["fp8", "fp4"]]
    assert problem.linears[0].options["fp8"] == full.linears[0].options["fp8"]
    bf16 = problem.linears[1].options["bf16"]
    assert (bf16.quality_loss, bf16.saving) == (0.0, 0.0)
    assert [row.flops for row in problem.linears] == [1.0, 1.0, 2.0]
    assert AvailableOptions((FP8, FP4), {}).restrict(full) == full


def test_a_transformer_engine_that_breaks_on_import_is_logged_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its linears then run BF16 only, and the log says why."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('no such library')")
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    forget_warnings()
    assert this_machine(with_te=True).te_version is None
    (record,) = caplog.records
    assert "importing Transformer Engine failed: RuntimeError: no such lib" in record.getMessage()
    assert record.exc_info
