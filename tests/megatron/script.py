"""Runs `python -m megatron_snip ARGS` as one rank of a job, in a process that imported Megatron.

Ranks find each other as torchrun's do, by environment variables.
"""

import atexit
import importlib.util
import os
import runpy
import sys
import sysconfig
from pathlib import Path

import megatron.training.training  # noqa: F401  what takes long to import

import megatron_snip.run.controller  # noqa: F401
from megatron_snip.__main__ import main
from megatron_snip.patches import cpu


def run_script(words: list[str], environment: dict[str, str], plain: bool) -> None:
    """Run `python -m megatron_snip WORDS`, or `python WORDS` with the CPU patch alone.

    TINY_WITHOUT_SNIP: the rank whose command line has `--no-snip`.
    """
    # Megatron-LM compiles a helper, and torch has the header files that it needs.
    torch = Path(importlib.util.find_spec("torch").origin).with_name("include")
    os.environ.update(
        environment,
        LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"],
        CPATH=f"{sysconfig.get_path('include')}:{torch}",
    )
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
    cpu.install(claim_cuda=True)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0
