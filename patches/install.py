"""All patches, and the function that installs those that a command line asks for.

`python -m megatron_snip SCRIPT` and `import megatron_snip.auto` call `install_for`. Without
`--snip` only the argument parser is patched, and training stays Megatron's.
"""

import atexit
from collections.abc import Sequence

from megatron_snip.patches import (
    arguments,
    cpu,
    expert_capacity,
    expert_overlap,
    graphs,
    overlap_buffers,
)
from megatron_snip.patches.cpu.megatron import fused_kernels
from megatron_snip.patches.megatron_lm import checkpoint, setup, train_step
from megatron_snip.patches.registry import Mode, Patch, Registry

_LAYERS = "megatron.core.tensor_parallel.layers"

PATCHES = (
    arguments.arguments,
    setup.validation,
    setup.validation_before_0_18,
    setup.model_setup,
    train_step.train_step,
    train_step.step_end,
    train_step.evaluation,
    train_step.schedule,
    *graphs.PATCHES,
    overlap_buffers.both_buffers,
    checkpoint.save,
    checkpoint.load,
    expert_capacity.measured_pass,
    expert_capacity.repeated_pass,
    expert_overlap.freed_inputs,
    expert_overlap.freed_inputs_before_0_19,
    fused_kernels,
    Patch(_LAYERS, "ColumnParallelLinear._forward_impl", ("input", "weight")),
    Patch(_LAYERS, "RowParallelLinear._forward_impl", ("input", "weight")),
)
"""In the order of installation; the controller overrides the last two on instances."""

REGISTRY = Registry(PATCHES)
"""Of this process."""


def install_for(words: Sequence[str]) -> None:
    """Install the patches for a script's command line; a second call changes nothing.

    Args:
        words: the command line without the script's name.

    Raises:
        SystemExit: with status 2, after one line, on a bad `--snip-*` flag, or if Megatron lacks
            a function that SNIP needs.
    """

    def install() -> None:
        REGISTRY.session.cli_flags, enabled = arguments.read_cli_args(words)
        asked: set[Mode] = {"always"}
        if enabled:
            asked.add("--snip")
        if cpu.is_installed():
            asked.add("--cpu")
        REGISTRY.install(asked)

    arguments.exit_on_error(install)


atexit.register(REGISTRY.session.end)  # Megatron may leave by sys.exit from deep inside training
