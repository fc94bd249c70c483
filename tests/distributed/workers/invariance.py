"""What test_invariance.py and test_moe.py run on ranks: one refresh in each of several layouts."""

from typing import Any

from tests.distributed.workers.small_model import layout, refresh_json

MODEL = {"num_layers": 4, "seq_length": 256, "global_batch_size": 8, "adam_eps": 1e-4}
"""Enough tokens, and D even enough, that no single element decides a sum (see the test)."""
EXPERTS = {"num_experts": 4, "num_layers": 2, "ffn_hidden_size": 256, "seq_length": 512}
EXPERTS |= {"global_batch_size": 4}
"""The same for a mixture of experts."""
FC1 = "decoder.layers.0.mlp.experts.linear_fc1"
SNIP = {"interval": 100, "start_step": 4, "lag": 1, "efficiency_target": 0.6}


def refresh_in(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train 3 steps, measure at the fourth, apply; return what each layout found and decided."""
    return {name: _refresh({**MODEL, **values}) for name, values in layouts.items()}


def refresh_of_experts_in(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The same of a mixture of experts."""
    return {name: _refresh({**MODEL, **EXPERTS, **values}) for name, values in layouts.items()}


def _refresh(values: dict[str, Any]) -> dict[str, Any]:
    with layout(values) as trainer:
        controller = trainer.run(5, SNIP)
        assert trainer.events.measured, trainer.warnings
        mine = [x.placements[0].expert for x in controller.model.linears if x.name == FC1]
        return {
            **refresh_json(trainer, controller),
            "losses": trainer.losses,
            "experts": sorted(expert for expert in mine if expert is not None),
        }
