"""What test_frozen.py runs on ranks: the same training, observed and not observed.

Observed under a policy's plan, and not observed under the same plan from a file; and with
`collect_only` against Megatron's own loop.
"""

from pathlib import Path
from typing import Any

from tests.distributed.workers.small_model import layout, save_random_plan

MODEL = {
    "num_layers": 1,
    "hidden_size": 128,
    "ffn_hidden_size": 128,
    "num_attention_heads": 2,
    "seq_length": 32,
    "global_batch_size": 2,
    "bf16": True,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
}
FROZEN = {"collect_only": True}
STEPS = 30


def with_and_without(layouts: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """Train each layout twice under one frozen plan; return the bits of both runs."""
    file = Path(folder) / "plan.json"
    return {name: _both({**MODEL, **values}, file) for name, values in layouts.items()}


def _both(values: dict[str, Any], file: Path) -> dict[str, Any]:
    with layout(values) as trainer:
        save_random_plan(trainer, file)
    observed = {"interval": 5, "start_step": 3, "measure_fraction": 0.34}
    return {
        "with": _train(values, {**FROZEN, "plan_file": file, **observed}),
        "without": _train(values, {**FROZEN, "plan_file": file, "start_step": STEPS + 1}),
        "collecting": _collect(values, {"collect_only": True, "interval": 4, "start_step": 2}),
        "megatron": _collect(values, None),
    }


def _collect(values: dict[str, Any], snip: dict[str, Any] | None) -> dict[str, Any]:
    """Train under SNIP, or with Megatron alone."""
    with layout(values) as trainer:
        hook = trainer.plain() if snip is None else trainer.controller(snip)
        trainer.advance(10, hook)
        hook.close()
        return {**trainer.digests(), "refreshes": len(trainer.events.measured)}


def _train(values: dict[str, Any], snip: dict[str, Any]) -> dict[str, Any]:
    print(values, snip, flush=True)  # the progress of a run that hangs
    with layout(values) as trainer:
        controller = trainer.controller(snip)
        applied = [(i, a.plan.digest, a.num_changed) for i, a in trainer.events.applied]
        trainer.advance(STEPS, controller)
        controller.close()
        statistics = [m.divergences.statistics for _, m in trainer.events.measured]
        return {
            **trainer.digests(),
            "refreshes": [s.iteration for s in statistics],
            "errors": [s.linears[-1].formats["fp4"].wgrad_error_square for s in statistics],
            "options": sorted({str(option) for option in controller.plan.linears.values()}),
            "warnings": trainer.warnings,
            "applied": applied,
            "digest": controller.plan.digest,
        }
