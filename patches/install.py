"""All patches, and the functions that install those that a command line or a script asks for.

`python -m megatron_snip SCRIPT` and `import megatron_snip.auto` call `install_for`, and a
SnipCallback calls `install_for_callback`. Without `--snip` only what reads settings is patched, and
training stays Megatron's. The patches are installed when the script has imported a loop, so the
script decides which Megatron that is: nothing here imports Megatron before. Megatron-Bridge imports
Megatron-LM's loop as well; a script of Megatron-LM needs no Bridge.
"""

import atexit
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_snip.errors import UnsupportedError
from megatron_snip.patches import (
    arguments,
    cpu,
    expert_capacity,
    expert_overlap,
    graphs,
    megatron_lm,
    overlap_buffers,
)
from megatron_snip.patches.imports import when_imported
from megatron_snip.patches.megatron_bridge import loop as bridge
from megatron_snip.patches.new_program import keep_in_new_program
from megatron_snip.patches.registry import Mode, Patch, Registry, Session

_LAYERS = "megatron.core.tensor_parallel.layers"

CORE_PATCHES = (
    *graphs.PATCHES,
    overlap_buffers.both_buffers,
    expert_capacity.measured_pass,
    expert_capacity.repeated_pass,
    expert_overlap.freed_inputs,
    expert_overlap.freed_inputs_before_0_19,
    Patch(_LAYERS, "ColumnParallelLinear._forward_impl", ("input", "weight")),
    Patch(_LAYERS, "RowParallelLinear._forward_impl", ("input", "weight")),
    Patch(
        "megatron.core.rerun_state_machine",
        "RerunStateMachine.validate_result",
        ("result", "rejection_func"),
    ),
)
"""Of what both loops train. The controller overrides the `_forward_impl` on instances, and the
guard the last one while an iteration may run again."""


@dataclass(frozen=True)
class Loop:
    """A training loop of Megatron's.

    Attributes:
        name: as users know it.
        module: whose import shows that a script uses the loop. It imports the other modules, so
            installing the patches when it has run imports none of them too early.
        patches: the patches on the loop.
    """

    name: str
    module: str
    patches: tuple[Patch, ...]

    @property
    def package(self) -> str:
        """The part of Megatron that has it: `megatron.training` or `megatron.bridge`."""
        return ".".join(self.module.split(".")[:2])


MEGATRON_LM = Loop("Megatron-LM", "megatron.training", megatron_lm.PATCHES)
MEGATRON_BRIDGE = Loop("Megatron-Bridge", bridge.PRETRAIN, bridge.PATCHES)
LOOPS = (MEGATRON_LM, MEGATRON_BRIDGE)

REGISTRY = Registry((*CORE_PATCHES, *MEGATRON_LM.patches, *MEGATRON_BRIDGE.patches))
"""Of this process."""


def install_for(words: Sequence[str], start: Sequence[str] = ()) -> list[str]:
    """Install the patches for a script's command line; a second call changes nothing.

    Args:
        words: the command line without the script's name, which is `sys.argv[0]`.
        start: words before the script's name that start it with SNIP, e.g. `-m megatron_snip`.

    Returns:
        The words without SNIP's flags.

    Raises:
        SystemExit: with status 2, after one line, on a bad `--snip-*` flag, or if Megatron lacks
            a function that SNIP needs: when the script imports a loop.
    """

    def install() -> list[str]:
        line = arguments.read_cli_args(words)
        if line.given:
            REGISTRY.session.given = line.given
        if line.flags or start:
            REGISTRY.on_uninstall(keep_in_new_program(start, line.flags))
        _install({"always", "--snip"} if line.enabled else {"always"}, LOOPS)
        return line.others

    return arguments.exit_on_error(install)


def install_for_callback() -> Session:
    """Install the patches for a SnipCallback; return what the patches of this process share.

    Raises:
        SystemExit: as in `install_for`.
    """
    arguments.exit_on_error(lambda: _install({"always", "--snip"}, (MEGATRON_BRIDGE,)))
    return REGISTRY.session


def _install(asked: set[Mode], loops: Sequence[Loop]) -> None:
    if cpu.is_installed():
        asked.add("--cpu")
    for loop in loops:
        found = partial(arguments.exit_on_error, partial(_install_loop, loop, asked))
        REGISTRY.on_uninstall(when_imported(loop.module, found))


def _install_loop(loop: Loop, asked: set[Mode]) -> None:
    """Install the patches on a loop that a script has imported, and on Megatron-Core."""
    try:
        REGISTRY.install(asked, (*CORE_PATCHES, *loop.patches))
    except UnsupportedError:
        REGISTRY.session.found_megatron = True  # the script ends here, and the error says why
        raise


# Megatron may leave by sys.exit from deep inside training.
atexit.register(lambda: REGISTRY.session.end())
