"""What test_invariance.py runs on ranks: one refresh in each of several layouts."""

from __future__ import annotations

from typing import Any

from tests.distributed.workers.small_model import layout, statistics_json

MODEL = {"num_layers": 4, "seq_length": 256, "global_batch_size": 8, "adam_eps": 1e-4}
"""Enough tokens, and D even enough, that no single element decides a sum (see the test)."""
SNIP = {
    "interval": 100,
    "start_step": 4,
    "lag": 1,
    "efficiency_target": 0.6,
}


def refresh_in(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train 3 steps, measure at the fourth, apply; return what each layout found and decided."""
    return {name: _refresh({**MODEL, **values}) for name, values in layouts.items()}


def _refresh(values: dict[str, Any]) -> dict[str, Any]:
    with layout(values) as trainer:
        controller = trainer.run(5, SNIP)
        refresh = trainer.measured
        return {
            "losses": trainer.losses[:4],
            "plan": {n: str(o) for n, o in controller.plan.linears.items()},
            "history": controller.history,
            "statistics": statistics_json(refresh.statistics),
            "health": [] if refresh.health is None else refresh.health.to_dict()["linears"],
            "divergences": {
                linear.name: {str(o): vars(d) for o, d in linear.options.items()}
                for linear in refresh.divergences.linears
            },
            "stages": {row.name: row.stage for row in refresh.problem.linears},
            "warnings": trainer.warnings,
        }
