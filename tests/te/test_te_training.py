"""Training steps with an optimizer: models and settings of jobs, plans that change, evaluations."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron_snip.linears.model import PlannedModel
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.sample import MeasureSettings
from tests.distributed.layouts import names
from tests.models import (
    EXPERTS,
    LATENT,
    assignment,
    batches,
    build,
    by_name,
    losses,
    planned,
    training,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective recompute": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp"],
    },
    "latent attention": LATENT,
    "multi-token prediction": {"mtp_num_layers": 1},
    "grouped experts": {"grouped": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", **EXPERTS},
}

PLANS = ("mxfp8", "bf16", "nvfp4-mxfp8-bf16", "mxfp8-nvfp4-nvfp4", "mxfp8")

Before = Callable[[int], Any]
"""Gets the number of a step; returns a context for its forward and backward."""


def states(model: Any, num_steps: int, before: Before = lambda _: nullcontext()) -> Iterator[Any]:
    """Train; yield losses, gradients and weights of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        with before(step):
            loss = losses(model)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        yield torch.tensor(loss), gradients, [p.detach().clone() for p in model.parameters()]


def same(one: Any, other: Any) -> bool:
    return torch.equal(one[0], other[0]) and all(
        len(a) == len(b) and all(map(torch.equal, a, b))
        for a, b in zip(one[1:], other[1:], strict=True)
    )


def measuring(under: PlannedModel) -> Before:
    """Measure every step in the formats of a Blackwell GPU."""
    formats = under.measured_formats(("fp8", "fp4"))

    def watch(step: int) -> Any:
        settings = MeasureSettings(formats, iteration=step + 1, seed=7)
        observer = StepObserver(settings, under.runtime.topology)
        return under.runtime.observed_by(observer)

    return watch


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_job_runs_is_bitwise_transformer_engine_s(variant: str) -> None:
    """Under a plan that changes nothing, and when every step is measured."""
    changes = VARIANTS[variant]
    plain = list(states(build(**changes), 3))
    assert not same(plain[0], plain[1])
    for is_measured in (False, True):
        model = build(**changes)
        under = planned(model)
        under.apply(under.job.options)
        before = measuring(under) if is_measured else lambda _: nullcontext()
        found = list(states(model, 3, before))
        assert all(map(same, found, plain))
        assert all(linear.runs_as_job for linear in under.linears)


CHANGING = [name for name in VARIANTS if name != "grouped experts"]


@pytest.mark.parametrize("variant", names(CHANGING, ["plain", "full recompute"]))
def test_a_plan_that_changes_runs_in_each_step_and_evaluations_leave_no_trace(
    variant: str,
) -> None:
    found = []
    for evaluates in (False, True):
        model = build(**VARIANTS[variant])
        under = planned(model)

        def before(step: int, model: Any = model, under: PlannedModel = under) -> Any:
            under.apply(assignment(under, PLANS[step]))
            for module in by_name(under).values():
                module.seen.clear()
            return nullcontext()

        kept = []
        for step, state in enumerate(states(model, len(PLANS), before)):
            kept.append(state)
            (option,) = {linear.option for linear in under.linears}
            for name, module in by_name(under).items():
                assert set(module.seen) == {option.formats}, (step, name)
            if evaluates:
                model.eval()
                evaluated = training(model, forward_only=True).run()
                assert len(evaluated) == 2
                model.train()
        found.append(kept)
    assert all(map(same, *found))


def test_microbatches_add_up() -> None:
    """Two of them in a step are the mean of two steps of one; powers of two scale exactly."""
    model = build()
    planned(model, "mxfp8")
    step = training(model, num_microbatches=2)
    step.run()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    data = batches()
    for _ in range(2):
        training(model, num_microbatches=1, data_iterator=data).run()
    alone = [p.grad / 2 for p in model.parameters()]
    assert all(map(torch.equal, together, alone))
