"""What test_te_operands.py runs on ranks: measured operands beside those that GEMMs multiply.

A job runs a recipe of its own under tensor parallelism, and every iteration is observed. The
observer's operands of a linear, quantized as the statistics quantize them, must be the bits that
fprop and dgrad of the same iteration multiply on this rank. (wgrad is not measured.) Gradients are
rounded to nearest: random numbers of Transformer Engine are its own.

Transformer Engine's own Python is found before Megatron is imported.
"""

import os

os.environ["NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"] = "1"  # read when it is imported

import tests.te_on_cpu.installed  # noqa: F401 - before anything that imports Megatron

# isort: split
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megatron_snip.formats import Format
from megatron_snip.linears.discovery import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te import quantizers
from megatron_snip.linears.te.modules import multiplied_input
from megatron_snip.linears.te.recipe import TERecipe
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.linears.te.refusals import gather_refusal
from megatron_snip.quantizers.quantize import quantize_dequantize_operand
from megatron_snip.statistics import observer
from megatron_snip.statistics.operands import Operands
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.types import GEMM_OPERANDS, Gemm, Operand
from tests import models
from tests.te_on_cpu import capability, probe

STEPS = 3
"""So that delayed scaling has a history."""
SIZES = {"hidden_size": 128, "ffn_hidden_size": 192, "num_attention_heads": 4}
FIRST = {Operand.WEIGHT: (Gemm.FPROP, Gemm.DGRAD), Operand.INPUT: (Gemm.WGRAD,)}
"""The GEMMs in which the probe calls an operand the first; in others it is the second."""


def mismatches(layout: dict[str, Any]) -> dict[str, list[str]]:
    """Return, by recipe, each operand of a GEMM that differs from what was measured.

    Args:
        layout: of the parallel ranks, as Megatron's configuration calls it.
    """
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with mock.patch.object(models, "SEQUENCE", 64):
        return {
            name: _mismatches(name, {"tensor_model_parallel_size": 2, **layout})
            for name in RECIPES
            if name != "bf16"
        }


def wrong_refusals() -> list[str]:
    """Return each option, and kind of linear, whose gathered input is not as SNIP says.

    Two ranks gather the input of a column-parallel linear in every combination of formats.
    """
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    common = {"bias": False, "params_dtype": torch.bfloat16, "parallel_mode": "column"}
    common |= {"sequence_parallel": True, "tp_group": group, "tp_size": 2}
    found = []
    for recipes in itertools.product(("bf16", "mxfp8", "tensorwise", "nvfp4"), repeat=3):
        recipe = TERecipe(*recipes)
        fprop, wgrad = (RECIPES[name].quantization for name in (recipe.fprop, recipe.wgrad))
        if recipe.is_uniform or (fprop.name != wgrad.name and fprop.bits == wgrad.bits):
            continue  # tests/te/test_te_linear.py has what is refused of equally many bits
        for module in (te.Linear(128, 128, **common), te.LayerNormLinear(128, 128, **common)):
            outcome = _gathered(module, recipe)
            said = gather_refusal(module, recipe.option, recipe) or ""
            words = {"fails": "cannot gather", "loses bits": "one of fewer bits", "": ""}
            if words[outcome] not in said or bool(said) != bool(outcome):
                found.append(f"{type(module).__name__} {recipe}: {outcome!r}, said {said!r}")
    return found


def _gathered(module: Any, recipe: TERecipe) -> str:
    """Run a step; return what happens to the input of wgrad."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 128, generator=generator).bfloat16()
    rank = torch.distributed.get_rank()
    own = x[32 * rank : 32 * (rank + 1)].clone().requires_grad_()
    custom = CustomRecipe(qfactory=getattr(quantizers, "_".join(recipe)))
    try:
        with probe.gemms() as gemms, te.fp8_autocast(enabled=True, fp8_recipe=custom):
            module(own).square().sum().backward()
    except NotImplementedError:
        return "fails"
    fmt = RECIPES[recipe.wgrad].quantization
    if fmt.bits <= RECIPES[recipe.fprop].quantization.bits:
        return ""
    (wgrad,) = (gemm for gemm in gemms if gemm.name == "wgrad")
    whole = multiplied_input(module, x).float()
    wanted = quantize_dequantize_operand(whole, fmt, Operand.INPUT, Gemm.WGRAD)
    return "" if torch.equal(wgrad.first, wanted) else "loses bits"


def _mismatches(name: str, layout: dict[str, Any]) -> list[str]:
    run = RECIPES[name].precision
    is_hopper = "wise" in name or "delayed" in name
    with capability.on((9, 0) if is_hopper else (10, 0)):
        FP8GlobalStateManager.reset()
        precision = {run.kind: run.format, f"{run.kind}_recipe": run.recipe}
        model = models.build(**SIZES, **precision, **layout)
        under = PlannedModel([model], current_topology(), seed=7)
        under.install()
        formats = under.measured_formats((run.kind,))
        found = []
        for step in range(STEPS):
            with torch.no_grad():
                for linear in under.linears:
                    linear.weights[0].mul_(1.0 + step)
            found += _differing(model, under, formats, step)
        return found


def _differing(model: Any, under: PlannedModel, formats: dict[str, Format], step: int) -> list[str]:
    watcher = observer.StepObserver(
        MeasureSettings(formats, step + 1, seed=7, all_tokens=True), under.runtime.topology
    )
    with (
        _kept_operands() as measured,
        probe.gemms() as gemms,
        under.runtime.observed_by(watcher),
    ):
        models.losses(model, num_microbatches=1)
    assert watcher.failure is None, watcher.failure
    names = {id(linear.module): linear.name for linear in under.linears}
    # Linears are measured in the order of their backwards.
    modules = [gemm.module for gemm in gemms if gemm.name == "wgrad"]
    assert len(modules) == len(measured) == len(names)
    (fmt,) = formats.values()
    differing = []
    for gemm in gemms:
        if Gemm(gemm.name) is Gemm.WGRAD:
            continue
        operands = measured[next(i for i, m in enumerate(modules) if m is gemm.module)]
        for operand in GEMM_OPERANDS[Gemm(gemm.name)]:
            multiplied = gemm.first if Gemm(gemm.name) in FIRST.get(operand, ()) else gemm.second
            ours = _quantized(operands, fmt, operand, Gemm(gemm.name))
            if not torch.equal(ours, multiplied):
                count = int((ours != multiplied).sum())
                text = f"step {step} {names[id(gemm.module)]} {gemm.name} {operand}"
                differing.append(f"{text}: {count} of {ours.numel()}")
    return differing


def _quantized(operands: Operands, fmt: Format, operand: Operand, gemm: Gemm) -> torch.Tensor:
    x = operands.of(operand)
    assert x is not None
    return quantize_dequantize_operand(
        x.detach(),
        fmt,
        operand,
        gemm,
        amax_or_scale=operands.amax_or_scale(fmt, operand),
        dtype=torch.float32,
    )


@contextlib.contextmanager
def _kept_operands() -> Iterator[list[Operands]]:
    """Keep what the observer measures, in order."""
    kept: list[Operands] = []
    original = observer.operand_sums

    def operand_sums(operands: Operands, *args: Any) -> Any:
        kept.append(operands)
        return original(operands, *args)

    with mock.patch.object(observer, "operand_sums", operand_sums):
        yield kept
