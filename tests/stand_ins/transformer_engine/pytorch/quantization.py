"""The autocast's state: which recipe is active, and what a compute capability supports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformer_engine.common.recipe import Format, MXFP8BlockScaling, Recipe
from transformer_engine.pytorch.quantizers import Quantizer


@dataclass(frozen=True)
class QuantizerRole:
    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


class RecipeState:
    """Makes the quantizers of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @classmethod
    def create(cls, recipe: Recipe, *, mode: str, num_quantizers: int, roles: Any) -> RecipeState:
        assert num_quantizers == len(roles) == 1
        assert (mode == "backward") == (roles[0].tensor_type == "grad_output")
        return cls(recipe)

    def make_quantizers(self) -> list[Quantizer]:
        hybrid = getattr(self.recipe, "fp8_format", None) is Format.HYBRID
        return [Quantizer(self.recipe.label + "_hybrid" * hybrid)]


def _at_least(major: int, what: str) -> tuple[bool, str]:
    if torch.cuda.get_device_capability() >= (major, 0):
        return True, ""
    return False, f"compute capability {major}.0 or higher is needed for {what}"


class FP8GlobalStateManager:
    """What every module asks in its forward."""

    enabled = False
    recipe: Recipe | None = None
    entered = 0
    """How many autocasts were entered: with a plan at BF16 in a BF16 run none should be."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.recipe if cls.recipe is not None else MXFP8BlockScaling()

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        if torch.cuda.get_device_capability() >= (8, 9):
            return True, ""
        return False, "compute capability 8.9 or higher is needed for FP8"

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        return _at_least(9, "FP8 blocks")

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        if torch.cuda.get_device_capability() >= (12, 0):
            return False, "MXFP8 does not cover compute capability 12.0"
        return _at_least(10, "MXFP8")

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        return _at_least(10, "NVFP4")


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    manager = FP8GlobalStateManager
    before = (manager.enabled, manager.recipe)
    manager.enabled, manager.recipe = enabled, fp8_recipe
    manager.entered += 1
    try:
        yield
    finally:
        manager.enabled, manager.recipe = before


fp8_model_init = None
"""The stand-in stores no parameters in low precision."""
