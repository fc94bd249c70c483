"""Runs `python -m megatron_snip ARGS` as one rank of a job, in a process that imported Bridge.

Bridge imports Transformer Engine, whose own Python runs here on the CPU (`tests/te_on_cpu`).
"""

import atexit
import importlib
import os
import runpy
import sys
from pathlib import Path

from megatron_snip.patches import cpu
from tests import te_on_cpu

TAKE_LONG = ("megatron.bridge.training.pretrain", "megatron.bridge.recipes.llama")
TAKE_LONG += ("megatron.bridge.recipes.qwen", "megatron_snip.run.controller")

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the Hub's client is imported
te_on_cpu.install()
cpu.install(claim_cuda=True, capability=(9, 0))
for module in TAKE_LONG:
    importlib.import_module(module)


def run_script(words: list[str], environment: dict[str, str], plain: bool) -> None:
    """Run `python -m megatron_snip WORDS`, or `python WORDS` with the CPU patch alone.

    TINY_WITHOUT_SNIP: the rank whose command line has `--no-snip`.
    """
    from megatron_snip.__main__ import main

    os.environ.update(environment, LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    if os.environ["RANK"] == environment.get("TINY_WITHOUT_SNIP"):
        words = [*words, "--no-snip"]
    if "wandb" in sys.modules:  # a rank that ended has removed what all inherit
        from wandb.sdk.data_types._private import MEDIA_TMP

        Path(MEDIA_TMP.name).mkdir(exist_ok=True)
    try:
        sys.exit(_run_plainly(words) if plain else main(words))
    finally:
        atexit._run_exitfuncs()


def _run_plainly(words: list[str]) -> int:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0
