"""When Transformer Engine makes quantizers and drops quantized weights, recorded with a real build.

    python -m tests.te.contract >tests/te/contract.json   # where Transformer Engine is installed

No GPU is needed: modules are built on the CPU, nothing is multiplied.
"""

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fp8_utils import _get_custom_recipe

from megatron_snip.linears.te.linear import reset_quantizers
from megatron_snip.linears.te.recipe import TERecipe
from megatron_snip.patches import cpu


def te(module: str) -> Any:
    return importlib.import_module(f"transformer_engine.{module}")


def linears() -> dict[str, Any]:
    made = partial(dict, params_dtype=torch.bfloat16, device="cpu", init_method=torch.nn.init.ones_)
    pytorch = te("pytorch")
    return {
        "Linear": pytorch.Linear(64, 32, **made()),
        "LayerNormLinear": pytorch.LayerNormLinear(64, 32, **made(bias=False)),
        "RMSNorm": pytorch.LayerNormLinear(64, 32, normalization="RMSNorm", **made()),
        "GroupedLinear": pytorch.GroupedLinear(2, 64, 32, **made()),
    }


def recipes() -> dict[str, Callable[[], Any]]:
    known = te("common.recipe")
    made: dict[str, Callable[[], Any]] = {
        "mxfp8": known.MXFP8BlockScaling,
        "mxfp8 hybrid": partial(known.MXFP8BlockScaling, fp8_format=known.Format.HYBRID),
        "blockwise": known.Float8BlockScaling,
        "nvfp4": known.NVFP4BlockScaling,
    }
    for mixed in (("nvfp4", "mxfp8", "bf16"), ("mxfp8", "blockwise", "nvfp4")):
        recipe = TERecipe(*mixed)
        made[str(recipe)] = partial(_get_custom_recipe, recipe.factory)
    return made


SEQUENCE = (
    *("mxfp8", "mxfp8", "mxfp8 hybrid", "", "mxfp8", "reset", "mxfp8", "nvfp4", "blockwise"),
    *("custom(nvfp4, mxfp8, bf16)", "custom(nvfp4, mxfp8, bf16)", "", "custom(nvfp4, mxfp8, bf16)"),
    *("custom(mxfp8, blockwise, nvfp4)", "reset", "custom(mxfp8, blockwise, nvfp4)", "mxfp8"),
)
"""Recipes of successive forwards; "" is none, "reset" is what this project does between them."""


def histories() -> dict[str, list[str]]:
    """Per recipe: are quantizers new, cached weights kept, is there a state; the quantizers."""
    made = recipes()
    autocast = te("pytorch.fp8").fp8_autocast
    found: dict[str, list[str]] = {}
    for name, module in linears().items():
        found[name] = []
        for label in SEQUENCE:
            if label == "reset":
                reset_quantizers(module)
                continue
            module._fp8_workspaces["weight"] = before = object()
            quantizers = module.quantizers["scaling_fwd"]
            with autocast(enabled=bool(label), fp8_recipe=made[label]() if label else None):
                module.init_fp8_metadata(num_gemms=getattr(module, "num_gemms", 1))
            forward, backward = module.quantizers["scaling_fwd"], module.quantizers["scaling_bwd"]
            new = "new" * (forward is not quantizers)
            kept = "weights kept" * (module._fp8_workspaces.get("weight") is before)
            held = "state" * (module.get_extra_state().numel() > 0)
            now = f"{' '.join(map(kind, forward))}; {' '.join(map(kind, backward))}"
            found[name].append(f"{label or 'bf16'}: {new}, {kept}, {held}; {now}")
    return found


def kind(quantizer: Any) -> str:
    """Classes of a quantizer of rows and of columns; one if they are the same."""
    pair = [getattr(quantizer, f"{d}_quantizer", quantizer) for d in ("rowwise", "columnwise")]
    names = [type(q).__name__.removesuffix("Quantizer") for q in pair]
    return "|".join(dict.fromkeys(names))


if __name__ == "__main__":
    cpu.install(claim_cuda=True, capability=(10, 0))
    version = importlib.import_module("transformer_engine").__version__
    json.dump({"version": version, "histories": histories()}, sys.stdout, indent=1)
