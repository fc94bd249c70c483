"""What every linear under a plan has, whatever runs it.

SimulatedMegatronLinear   Megatron's own linear, GEMMs simulated        megatron_linear.py
SimulatedTELinear         Transformer Engine's, GEMMs simulated         te/simulated.py
RecipeTELinear            Transformer Engine's under its own recipes    te/linear.py
"""

from typing import Any, Protocol

import torch

from megatron_snip.config import Backend
from megatron_snip.linears.te.stored_weight import StoredWeights
from megatron_snip.options import Option
from megatron_snip.statistics.observer import DelayedScales
from megatron_snip.topology import Placement


class PlannedLinear(Protocol):
    """One linear of Megatron's under a plan.

    Attributes:
        backend: what runs it.
        module: Megatron's module.
        name: the linear's layout-independent name.
        placements: where each of its weights is; experts of a grouped linear have one each.
        weights: [N, K] of this shard, in the same order.
        option: formats of its GEMMs; assign while no forward-backward runs, on all ranks alike.
    """

    backend: Backend
    module: Any
    name: str
    placements: tuple[Placement, ...]
    weights: tuple[torch.nn.Parameter, ...]
    option: Option

    @property
    def job_option(self) -> Option:
        """The option that stands for what the job itself runs."""

    @property
    def runs_as_job(self) -> bool:
        """Whether the module runs as the job runs it."""

    @property
    def recipe(self) -> str:
        """Label of what runs the GEMMs."""

    def refusal(self, option: Option) -> str | None:
        """Return why the linear cannot run an option here, or None if it can."""

    def install(self) -> None:
        """Put the module under the plan; idempotent."""

    def uninstall(self) -> None:
        """Restore the module; idempotent."""


class PlannedTELinear(PlannedLinear, Protocol):
    """A planned linear of Transformer Engine's, in either backend.

    Attributes:
        stored: its weights, where the job stores them quantized, or None.
    """

    stored: StoredWeights | None

    def begin_step(self) -> None:
        """Drop what was made of the weights of the step before."""

    def delayed_scales(self, placement: Placement) -> DelayedScales | None:
        """Return what returns a weight's scales; None if it runs no delayed scaling."""
