"""The tiny script with a model whose loss is infinite whenever a linear runs FP4."""

import math
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel

from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import Option

apply, forward = PlannedModel.apply, GPTModel.forward
runs_fp4 = False


def noted(self: PlannedModel, options: Mapping[str, Option]) -> Any:
    global runs_fp4
    runs_fp4 = any("fp4" in str(option) for option in options.values())
    return apply(self, options)


def broken(self: GPTModel, *args: Any, **kwargs: Any) -> Any:
    output = forward(self, *args, **kwargs)
    return output * math.inf if runs_fp4 else output


PlannedModel.apply = noted  # type: ignore[method-assign]
GPTModel.forward = broken
runpy.run_path(str(Path(__file__).with_name("pretrain_tiny.py")), run_name="__main__")
