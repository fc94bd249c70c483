"""What runs where: the table, its page, and what linears obey."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_snip.linears.backends import CAPABILITIES, Backend, How, Machine

from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.formats import FORMATS
from megatron_snip.linears import backends
from megatron_snip.options import BF16, Option, enumerate_options
from megatron_snip.types import Gemm

PAGE = Path(__file__).parents[3] / "docs" / "backends.md"
AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER = (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)
GPUS = (AMPERE, (8, 6), ADA, HOPPER, (10, 0), BLACKWELL, CONSUMER, (12, 1))


def te(capability: tuple[int, int] | None, **changes: object) -> Machine:
    values: dict[str, object] = {"te_version": "2.20.2", "te_per_gemm": True}
    return Machine(capability, **(values | changes))  # type: ignore[arg-type]


def test_the_page_is_what_the_code_prints() -> None:
    """Print it again with `python -m megatron_snip.linears.backends > docs/backends.md`."""
    assert PAGE.read_text() == backends.markdown()


def test_the_page_has_every_format_gemm_and_capability_of_every_backend() -> None:
    sections = PAGE.read_text().split("\n## ")[1:]
    assert [text.split("\n")[0] for text in sections] == list(Backend)
    for text in sections:
        lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
        assert lines[0] == ["format", "GEMM", *CAPABILITIES.values()]
        seen = [(line[0].strip("`"), gemm) for line in lines[2:] for gemm in line[1].split(", ")]
        assert sorted(seen) == sorted((fmt, gemm) for fmt in FORMATS for gemm in Gemm)
        for line in lines[2:]:
            assert len(line) == len(lines[0])
            assert all(cell.startswith(tuple(f"**{how}**: " for how in How)) for cell in line[2:])


@pytest.mark.parametrize(
    ("capability", "where"),
    [
        (None, None),
        ((7, 0), None),
        (AMPERE, "8.0"),
        ((8, 6), "8.0"),
        (ADA, "8.9"),
        (HOPPER, "9.0"),
        ((10, 0), "10.x"),
        (BLACKWELL, "10.x"),
        ((11, 0), None),
        (CONSUMER, "12.x"),
        ((13, 0), None),
    ],
)
def test_capabilities_have_columns(capability: tuple[int, int] | None, where: str | None) -> None:
    assert backends.column(capability) == where


@pytest.mark.parametrize(
    ("fmt", "words"),
    [
        ("bf16", ["bf16", "bf16", "bf16", "bf16", "bf16"]),
        ("fp8", [None, None, "blockwise", "mxfp8", None]),
        ("mxfp8", [None, None, None, "mxfp8", None]),
        ("fp4", [None, None, None, "nvfp4", "nvfp4"]),
        ("nvfp4", [None, None, None, "nvfp4", "nvfp4"]),
        ("mxfp4", [None, None, None, None, None]),
        ("fp3", [None, None, None, None, None]),
    ],
)
def test_recipes_of_transformer_engine(fmt: str, words: list[str | None]) -> None:
    option = Option.uniform(fmt)
    for capability, word in zip((AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER), words, strict=True):
        machine = te(capability)
        if word is None:
            assert backends.refusal(Backend.TE, option, machine)
            with pytest.raises(UnsupportedError, match="Transformer Engine cannot run"):
                backends.te_recipe(option, machine)
        else:
            assert backends.refusal(Backend.TE, option, machine) is None
            assert backends.te_recipe(option, machine).words == (word, word, word)


@pytest.mark.parametrize("capability", GPUS)
def test_an_option_has_a_recipe_exactly_where_it_is_not_refused(
    capability: tuple[int, int],
) -> None:
    machine = te(capability)
    runs = {o.fprop for o in map(Option.uniform, FORMATS) if not _refused(o, machine)}
    assert "bf16" in runs
    for option in enumerate_options(tuple(FORMATS), "gemm"):
        assert _refused(option, machine) == (not set(option.formats) <= runs)
        if not _refused(option, machine):
            recipe = backends.te_recipe(option, machine)
            assert recipe.is_uniform == (len(set(recipe.words)) == 1)


def _refused(option: Option, machine: Machine) -> bool:
    return backends.refusal(Backend.TE, option, machine) is not None


def test_every_machine_simulates_everything_and_runs_bf16() -> None:
    for capability in (None, (7, 5), *GPUS):
        machine = te(capability)
        for option in enumerate_options(tuple(FORMATS), "gemm"):
            assert backends.refusal(Backend.SIMULATE, option, machine) is None
        for backend in Backend:
            assert backends.refusal(backend, BF16, machine) is None


def test_nothing_quantized_runs_without_a_gpu_under_te() -> None:
    for name in FORMATS:
        if name == "bf16":
            continue
        reason = backends.refusal(Backend.TE, Option.uniform(name), te(None))
        assert reason is not None and f"{name} on no GPU" in reason


def test_options_by_gemm_need_a_transformer_engine_that_has_them() -> None:
    mixed = Option.parse("nvfp4-mxfp8-bf16")
    assert backends.refusal(Backend.TE, mixed, te(BLACKWELL)) is None
    reason = backends.refusal(Backend.TE, mixed, te(BLACKWELL, te_per_gemm=False))
    assert reason is not None and "2.20.2 has no quantizers by GEMM" in reason
    # Two formats that run as the same recipe need no quantizers by GEMM.
    same = Option.parse("fp4-nvfp4-nvfp4")
    assert backends.refusal(Backend.TE, same, te(BLACKWELL, te_per_gemm=False)) is None


def test_transformer_engine_has_the_last_word() -> None:
    machine = te(HOPPER, te_unavailable={"blockwise": "CUDA 12.9 is needed"})
    reason = backends.refusal(Backend.TE, Option.uniform("fp8"), machine)
    assert reason == "fp8 on compute capability 9.0: CUDA 12.9 is needed"
    assert backends.refusal(Backend.TE, BF16, machine) is None
    absent = te(BLACKWELL, te_version=None)
    reason = backends.refusal(Backend.TE, Option.uniform("fp8"), absent)
    assert reason is not None and "cannot be imported" in reason
    assert backends.refusal(Backend.TE, BF16, absent) is None


def test_cells_say_why() -> None:
    for backend in Backend:
        for _, _, cells in backends.rows(backend):
            for cell in cells.values():
                assert cell.why and cell.why[0] != " "
                runs_in_te = backend is Backend.TE and cell.how is not How.REFUSED
                assert bool(cell.word) == (runs_in_te or cell.word == "bf16")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown format 'fp5'"):
        backends.support(Backend.TE, "fp5", Gemm.FPROP, "9.0")


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("fmt", [name for name in FORMATS if name != "bf16"])
def test_auto_runs_natively_what_hopper_can_and_simulates_the_rest(
    capability: tuple[int, int], fmt: str
) -> None:
    machine = Machine(capability)
    scaled_by_128 = ("fp8", "fp8_pow2", "fp4", "fp4_pow2", "fp4_rht", "fp3")
    runs = dict.fromkeys(Gemm, capability == HOPPER and fmt in scaled_by_128)
    runs[Gemm.WGRAD] &= fmt != "fp4_rht"  # no kernel rotates
    whole = all(runs.values())
    assert (backends.refusal(Backend.NATIVE, Option.uniform(fmt), machine) is None) == whole
    for gemm in Gemm:
        wanted = Backend.NATIVE if runs[gemm] else Backend.SIMULATE
        assert backends.resolve("auto", fmt, gemm, machine) is wanted
        assert backends.resolve("simulate", fmt, gemm, machine) is Backend.SIMULATE
        assert backends.resolve("native", fmt, gemm, machine) is Backend.NATIVE


def test_a_failed_check_keeps_linears_from_running_natively() -> None:
    machine = Machine(HOPPER, native_obstacle="its check failed: fprop is off")
    reason = backends.refusal(Backend.NATIVE, Option.parse("bf16-fp8-bf16"), machine)
    assert reason is not None and "its check failed: fprop is off" in reason
    assert backends.refusal(Backend.NATIVE, BF16, machine) is None
    assert backends.resolve("auto", "fp8", Gemm.FPROP, machine) is Backend.SIMULATE
    # what no Hopper can run keeps its own reason
    reason = backends.refusal(Backend.NATIVE, Option.uniform("nvfp4"), machine)
    assert reason is not None and "only FP32 scales" in reason
