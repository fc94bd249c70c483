"""What test_moe.py runs on ranks: a refresh of a mixture of experts in several layouts."""

from __future__ import annotations

from typing import Any

from megatron_snip.statistics.health import HealthTable
from tests.distributed.workers.small_model import layout, statistics_json

MODEL = {
    "num_layers": 2,
    "ffn_hidden_size": 256,
    "num_experts": 4,
    "seq_length": 512,
    "adam_eps": 1e-4,
}
"""Enough tokens, and D even enough, that no single element decides a sum."""
SNIP = {
    "interval": 100,
    "start_step": 4,
    "lag": 1,
    "efficiency_target": 0.6,
}
STEPS = 5


def refresh_in(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train 3 steps, measure at the fourth, apply; return what each layout found and decided."""
    return {name: _refresh({**MODEL, **values}) for name, values in layouts.items()}


def _refresh(values: dict[str, Any]) -> dict[str, Any]:
    with layout(values) as trainer:
        controller = trainer.run(STEPS, SNIP)
        assert trainer.events.measured, trainer.warnings
        refresh = trainer.measured
        return {
            "losses": trainer.losses,
            "plan": {n: str(o) for n, o in controller.plan.linears.items()},
            "history": controller.history,
            "statistics": statistics_json(refresh.statistics),
            "divergences": {
                linear.name: {str(o): vars(d) for o, d in linear.options.items()}
                for linear in refresh.divergences.linears
            },
            "experts": sorted(
                linear.placements[0].expert
                for linear in controller.model.linears
                if linear.name == "decoder.layers.0.mlp.experts.linear_fc1"
            ),
            "worst experts": {
                f"{row['name']} {fmt} {operand}": values["worst_expert"]
                for row in (refresh.health or HealthTable(0, ())).to_dict()["linears"]
                for fmt, operands in row["operands"].items()
                for operand, values in operands.items()
            },
            "warnings": trainer.warnings,
        }
