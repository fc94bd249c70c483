"""What test_controller.py runs on ranks: complete cycles."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_snip.errors import SnipError
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest, write_plan
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.state import ControllerState
from megatron_snip.trainer.data import iteration_batches
from megatron_snip.trainer.model import forward_step
from megatron_snip.types import Gemm
from tests.distributed.launch import ROOT
from tests.distributed.workers.small_model import Trainer, layout

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 128,
    "num_attention_heads": 2,
    "seq_length": 16,
    "global_batch_size": 2,
}
SNIP: dict[str, Any] = {"interval": 4, "start_step": 2, "lag": 1, "efficiency_target": 0.5}
"""Refreshes at iterations 2 and 6; their plans are due before iterations 3 and 7."""


def cycles(layout_values: dict[str, Any], folder: str) -> dict[str, Any]:
    """Runs that succeed: twice the same, stopped and resumed, and watched only."""
    watching = {**SNIP, "collect_only": True, "alert": "underflow>0.01"}
    return {
        "uninterrupted": _run(layout_values, SNIP, Path(folder) / "uninterrupted"),
        "again": _run(layout_values, SNIP, None),
        "resumed": _resumed(layout_values),
        "collect only": _run(layout_values, watching, None),
    }


def _run(
    layout_values: dict[str, Any], snip: dict[str, Any], folder: Path | None
) -> dict[str, Any]:
    with layout({**MODEL, **layout_values}) as trainer:
        files = [RunDirectory(folder)] if folder is not None and dist.get_rank() == 0 else []
        controller = trainer.controller(snip, writers=files)
        before = {"_forward_impl" in p.module.__dict__ for p in controller.model.linears}
        trainer.advance(9, controller)
        controller.close()
        after = {"_forward_impl" in p.module.__dict__ for p in controller.model.linears}
        return {
            **trainer.digests(),
            "history": controller.history,
            "digest": controller.plan.digest,
            "refreshes": [iteration for iteration, _ in trainer.events.measured],
            "fractions": [v["lowest_precision_fraction"] for _, v in trainer.events.metrics],
            "installed": [*before, *after],
            "warnings": trainer.warnings,
            "notices": [(i, n.kind, n.message) for i, n in trainer.events.notices],
        }


def planned(trainer: Trainer) -> list[tuple[int, int, int]]:
    """(iteration, measured iteration, linears changed) of every plan applied."""
    return [(i, a.plan.iteration, a.num_changed) for i, a in trainer.events.applied]


def _resumed(layout_values: dict[str, Any]) -> dict[str, Any]:
    """Stop after iteration 2, while its problem is being solved, and again under its plan."""
    applied, alerts = [], []
    with layout({**MODEL, **layout_values}) as trainer:
        snip = {**SNIP, "alert": "underflow>0.01"}
        controller = trainer.controller(snip)
        for steps in (2, 2, 5):
            trainer.advance(steps, controller)
            text = json.dumps(controller.state(trainer.step).to_dict())
            controller.close()
            alerts.append([i for i, n in trainer.events.notices if n.kind == "health"])
            applied.append([(i, a.plan.iteration, a.resumed) for i, a in trainer.events.applied])
            if trainer.step < 9:
                state = ControllerState.from_dict(json.loads(text))
                controller = trainer.controller(snip, state=state)
        plan, history = controller.plan.digest, controller.history
        return {**trainer.digests(), "history": history, "digest": plan, "applied": applied,
                "alerts": alerts}  # fmt: skip


SCHEDULED = {**SNIP, "interval": 50, "granularity": "gemm"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "healed": {"target_schedule": "0:0.8,5:0.5", "heal_from": 8, "heal_order": "forward"},
    "static": {"policy": "last-blocks", "target_schedule": "0:0.75,5:~0.25,9:0.5"},
}


def schedules(layout_values: dict[str, Any]) -> dict[str, Any]:
    """Eighteen iterations with one refresh under each schedule, at once and stopped twice."""
    return {
        name: [_scheduled(layout_values, snip, parts) for parts in ((18,), (4, 6, 8))]
        for name, snip in SCHEDULES.items()
    }


def _scheduled(
    layout_values: dict[str, Any], snip: dict[str, Any], parts: tuple[int, ...]
) -> dict[str, Any]:
    state, applied, measured = None, [], []
    with layout({**MODEL, **layout_values, "train_iters": 18}) as trainer:
        for steps in parts:
            controller = trainer.controller({**SCHEDULED, **snip}, state=state)
            trainer.advance(steps, controller)
            saved = json.loads(json.dumps(controller.state(trainer.step).to_dict()))
            state = ControllerState.from_dict(saved)
            controller.close()
            measured += [i for i, _ in trainer.events.measured]
            applied += [(i, a.plan) for i, a in trainer.events.applied if not a.resumed]
        plans = [(i, p.target, p.efficiency, _low_gemms(p)) for i, p in applied]
        return {**trainer.digests(), "plans": plans, "measured": measured,
                "history": controller.history, "warnings": trainer.warnings}  # fmt: skip


def _low_gemms(plan: PrecisionPlan) -> list[list[str]]:
    return [[n, g] for n, o in plan.linears.items() for g in Gemm if o[g] == "fp4"]


def refusals(layout_values: dict[str, Any], folder: str) -> dict[str, Any]:
    """What cannot work is refused before training: the same error on every rank."""
    misfit = Path(folder) / "misfit.json"
    with layout({**MODEL, **layout_values}) as trainer:
        controller = trainer.controller({"policy": "uniform-fp4"})
        plan = controller.plan
        controller.close()
        if dist.get_rank() == 0:
            linears = {**plan.linears, "decoder.layers.9.mlp.linear_fc1": Option.uniform("fp4")}
            digest = assignment_digest(linears)
            write_plan(plan.model_copy(update={"linears": linears, "digest": digest}), misfit)
        dist.barrier()
        cases: dict[str, dict[str, Any]] = {
            "policy": {"policy": "clever"},
            "pin": {"pins": ("decoder.layers.7.*=fp8",)},
            "target": {"pins": ("*=fp8",), "efficiency_target": 0.1},
            "plan file": {"plan_file": misfit},
            "missing plan file": {"plan_file": Path(folder) / "nowhere.json"},
        }
        return {name: _refusal(trainer, snip) for name, snip in cases.items()}


def _refusal(trainer: Trainer, snip: dict[str, Any]) -> tuple[str, str]:
    try:
        trainer.controller(snip).close()
    except SnipError as error:
        return type(error).__name__, str(error)
    return "", ""


def own_loop() -> dict[str, Any]:
    """The loop that docs/extending.md shows, and the trainer's on the same data."""
    steady = {"lr_decay_style": "constant", "lr_warmup_iters": 0, "seq_length": 64}
    values = {**MODEL, **steady, "global_batch_size": 4, "micro_batch_size": 1}
    with layout(values) as trainer:
        hook = trainer.run(30, {"start_step": 11, "interval": 10, "efficiency_target": 0.5})
        expected = {"history": hook.history, "weights": trainer.digests()["weights"]}
    text = (ROOT / "docs" / "extending.md").read_text().split("## A training loop of your own")[1]
    code = text.split("```python\n")[1].split("```")[0]
    with layout(values) as trainer:
        data = (
            batch
            for iteration in range(1, 31)
            for batch in iteration_batches(
                trainer.samples, trainer.config, iteration, dist.get_rank(), 2
            )
        )
        model, optimizer = list(trainer.state.model), trainer.state.optimizer
        scope = {"model": model, "optimizer": optimizer, "data": data, "forward_step": forward_step}
        exec(compile(code, "extending.md", "exec"), scope)
        shown = {"history": scope["snip"].history, "weights": trainer.digests()["weights"]}
    saved = ControllerState.from_dict(scope["saved"])
    return {
        "lines": len(code.splitlines()),
        "trainer": expected,
        "shown": shown,
        "saved": [saved.iteration, saved.history],
    }
