"""The tiny script in which FP4 breaks: all becomes infinite. A plan with it must go."""

import math
import runpy
from pathlib import Path

import torch

from tests.distributed.workers.broken_format import broken_format

with broken_format("fp4", lambda tensor, *_: torch.full_like(tensor, math.inf)):
    runpy.run_path(str(Path(__file__).with_name("pretrain_tiny.py")), run_name="__main__")
