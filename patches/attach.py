"""Attaching: from a built model and a loaded checkpoint to a controller in charge of training."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.controller import SnipController
from megatron_snip.linears.discovery import current_topology
from megatron_snip.patches.outputs import make_writers
from megatron_snip.patches.refusals import refuse_modules
from megatron_snip.patches.session import Session
from megatron_snip.patches.step_metrics import StepMetrics
from megatron_snip.state import ControllerState
from megatron_snip.topology import Topology

logger = logging.getLogger(__name__)


def attach(
    session: Session, config: SnipConfig, args: argparse.Namespace, model: Any, optimizer: Any
) -> None:
    """All ranks: attach a controller to the model that Megatron has built (and loaded).

    Raises:
        SnipError: on every rank, if the settings or the checkpoint's state do not fit the model.
    """
    refuse_modules(model)
    topology = current_topology()
    state = _resumed_state(session.loaded, args, topology)
    writers = make_writers(config, args, topology)
    session.controller = SnipController(
        config, model, optimizer, writers=writers, state=state, topology=topology
    )
    session.metrics = StepMetrics(topology)
    if topology.rank == 0:
        linears, plan = session.controller.model.all_linears, session.controller.plan
        verb = "starts with" if state is None else f"resumes after iteration {state.iteration} with"
        logger.info("snip: plans %d linears; training %s %s", len(linears), verb, plan.label)


def _resumed_state(
    loaded: dict[str, Any] | None, args: argparse.Namespace, topology: Topology
) -> ControllerState | None:
    """Return the state to go on from, or None to start anew; rank 0 says what was left out."""
    iteration = int(getattr(args, "iteration", 0) or 0)
    missing = None
    state = None
    if loaded is not None:
        state = ControllerState.from_dict(loaded, "SNIP state of the checkpoint")
        if state.iteration != iteration:
            missing = (
                f"the checkpoint's SNIP state is of iteration {state.iteration} and training goes on "
                f"from {iteration}: its plan stays, a refresh in flight is dropped"
            )
            state = state.restarted_at(iteration)
    elif iteration > 0:
        missing = (
            f"the checkpoint of iteration {iteration} has no SNIP state; "
            "starting from the initial plan"
        )
    if missing is not None and topology.rank == 0:
        logger.warning(missing)
    return state
