"""The autocast's state: which recipe is active, and what a compute capability supports."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)


@dataclass(frozen=True)
class QuantizerRole:
    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


def _at_least(major: int, what: str) -> tuple[bool, str]:
    if torch.cuda.get_device_capability() >= (major, 0):
        return True, ""
    return False, f"compute capability {major}.0 or higher is needed for {what}"


class FP8GlobalStateManager:
    """What every module asks in its forward."""

    enabled = False
    recipe: Recipe | None = None
    group: Any = None
    entered = 0
    """How many autocasts were entered: with a plan at BF16 in a BF16 run none should be."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.recipe if cls.recipe is not None else MXFP8BlockScaling()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.group

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return False

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


_CHECKS = {
    Float8BlockScaling: FP8GlobalStateManager.is_fp8_block_scaling_available,
    MXFP8BlockScaling: FP8GlobalStateManager.is_mxfp8_available,
    NVFP4BlockScaling: FP8GlobalStateManager.is_nvfp4_available,
}


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    check = _CHECKS.get(type(fp8_recipe))
    if enabled and check is not None:
        available, reason = check()
        if not available:
            raise RuntimeError(reason)
    manager = FP8GlobalStateManager
    before = (manager.enabled, manager.recipe, manager.group)
    manager.enabled, manager.recipe, manager.group = enabled, fp8_recipe, fp8_group
    manager.entered += 1
    try:
        yield
    finally:
        manager.enabled, manager.recipe, manager.group = before


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    if enabled:
        raise RuntimeError("the stand-in stores no parameters in low precision")
    yield
