"""All seams of a process, and the one registry that installs them.

`install_for(words)` is what `python -m megatron_snip SCRIPT` and `import megatron_snip.auto` call.
Without `--snip` among the words only the argument parser is wrapped: training stays Megatron's.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence

from megatron_snip.log import warn_once
from megatron_snip.patches import (
    arguments,
    checkpoint_load,
    checkpoint_save,
    checkpoint_sidecar,
    cpu,
    evaluation,
    fused_kernels,
    model_setup,
    step_end,
    train_step,
    validation,
)
from megatron_snip.patches.registry import Registry
from megatron_snip.patches.seam import When
from megatron_snip.patches.settings import read_wish
from megatron_snip.patches.target import Target
from megatron_snip.patches.validation import speaks

logger = logging.getLogger(__name__)

SEAMS = (
    arguments.SEAM,
    validation.SEAM,
    validation.INITIALIZE_SEAM,
    model_setup.SEAM,
    train_step.SEAM,
    step_end.SEAM,
    evaluation.SEAM,
    checkpoint_save.SEAM,
    checkpoint_sidecar.SEAM,
    checkpoint_load.SEAM,
    fused_kernels.SEAM,
)
"""In the order of installation."""

LINEAR_TARGETS = tuple(
    Target("megatron.core.tensor_parallel.layers", f"{kind}._forward_impl", ("input", "weight"))
    for kind in ("ColumnParallelLinear", "RowParallelLinear")
)
"""Methods that a controller overrides on each planned linear (linears/seam.py), for the record."""

REGISTRY = Registry(SEAMS)
"""Of this process."""


def install_for(words: Sequence[str]) -> None:
    """Install what a script's command line asks for; doing so twice changes nothing.

    Args:
        words: the script's command line without its name.

    Raises:
        UnsupportedError: if a symbol is missing, or the release of megatron-core is refused.
    """
    wish = read_wish(words)
    if wish.forgotten and speaks():
        warn_once(logger, f"without --snip these have no effect: {', '.join(wish.forgotten)}")
    REGISTRY.session.given = wish.given
    asked: set[When] = {"always"}
    if wish.enabled:
        asked.add("--snip")
    if cpu.is_installed():
        asked.add("--cpu")
    REGISTRY.install(asked, wish.strict_version)


atexit.register(REGISTRY.session.end)  # Megatron may leave by sys.exit from deep inside training
