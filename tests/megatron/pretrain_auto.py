"""The tiny script with one more line at its top; what follows is `pretrain_tiny.py` unchanged."""

import runpy
from pathlib import Path

import megatron_snip.auto  # noqa: F401  the line

runpy.run_path(str(Path(__file__).with_name("pretrain_tiny.py")), run_name="__main__")
