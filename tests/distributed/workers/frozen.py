"""What test_frozen.py runs on ranks: the same training with and without refreshes."""

from __future__ import annotations

from typing import Any

from tests.distributed.workers.small_model import layout

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
PLAN = {"policy": "random", "efficiency_target": 0.5, "freeze_plan": True, "seed": 3}
STEPS = 30


def with_and_without(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train each layout twice under one frozen plan; return the bits of both runs."""
    return {name: _both({**MODEL, **values}) for name, values in layouts.items()}


def _both(values: dict[str, Any]) -> dict[str, Any]:
    refreshing = {"interval": 5, "stat_microbatches": 2, "probe_rows": 8}
    return {
        "with": _train(values, {**PLAN, **refreshing}),
        "without": _train(values, {**PLAN, "start_step": STEPS}),
    }


def _train(values: dict[str, Any], snip: dict[str, Any]) -> dict[str, Any]:
    print(values, snip, flush=True)  # where a run that hangs has come to
    with layout(values) as trainer:
        controller = trainer.run(STEPS, snip)
        statistics = [r.statistics for r in trainer.reporter.refreshes]
        return {
            **trainer.digests(),
            "refreshes": [s.step for s in statistics],
            "probed": [s.linears[-1].probe_input_square for s in statistics],
            "options": sorted({str(option) for option in controller.plan.linears.values()}),
            "warnings": trainer.warnings,
        }
