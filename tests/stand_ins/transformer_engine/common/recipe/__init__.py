"""Recipes: compared by value, distinguished by class."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Format(Enum):
    E2M1 = "e2m1"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """Base: `label` names what a recipe quantizes to."""

    label = ""


class DelayedScaling(Recipe):
    """Megatron's class inherits from it."""


@dataclass
class _Float8(Recipe):
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


class Float8CurrentScaling(_Float8):
    label = "tensorwise"


class Float8BlockScaling(_Float8):
    label = "blockwise"


class MXFP8BlockScaling(_Float8):
    label = "mxfp8"


@dataclass
class NVFP4BlockScaling(Recipe):
    fp4_format: Format = Format.E2M1
    fp8_dpa: bool = False
    fp8_mha: bool = False
    label = "nvfp4"


@dataclass
class CustomRecipe(Recipe):
    qfactory: Callable[..., Any]
    label = "custom"
