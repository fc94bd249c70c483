"""Measuring passes on Megatron's schedule: what they run, and that they leave no trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils

from megatron_snip.linears.passes import MeasuringPasses, TrainingPass, tolerating_non_finite
from megatron_snip.linears.runtime import Mode, Runtime
from megatron_snip.topology import DataAxis, TensorAxis, Topology
from tests.unit.linears.conftest import MakeModel

SEQUENCE, BATCH = 8, 2


class Silent:
    """An observer that watches nothing."""

    def observe(self, placement: Any, input: Any, weight: Any, output: Any, sp: bool) -> Any:
        return output


def batches() -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    while True:
        tokens = torch.randint(0, 32, (BATCH, SEQUENCE + 1), generator=generator)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def forward_step(data: Any, model: Any) -> Any:
    batch = next(data)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    output = model(batch["tokens"], positions, None, labels=batch["labels"])

    def loss(values: torch.Tensor) -> Any:
        mean = values.float().mean()
        return mean, {"lm loss": mean.detach().clone()}  # the schedule divides in place

    return output, loss


def training(model: Any, num_microbatches: int = 4, **changes: Any) -> TrainingPass:
    kwargs = {
        "forward_step_func": forward_step,
        "data_iterator": batches(),
        "model": [model],
        "num_microbatches": num_microbatches,
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
        "forward_only": False,
    }
    return TrainingPass(get_forward_backward_func(), {**kwargs, **changes})


def passes(model: Any, wanted: int = 2, topology: Topology | None = None) -> MeasuringPasses:
    return MeasuringPasses(training(model), Runtime(topology or Topology(), 0), wanted)


def rng_draws() -> list[Any]:
    """The next number of every generator that a forward might use."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(3).tolist()
    return [tracked, torch.rand(3).tolist(), np.random.rand(), random.random()]


def test_random_numbers_go_on_as_if_nothing_had_run(make_model: MakeModel) -> None:
    model = make_model()
    expected = rng_draws()
    model = make_model()  # seeds again
    np_state, py_state = np.random.get_state(), random.getstate()
    again = rng_draws()
    np.random.set_state(np_state)
    random.setstate(py_state)
    assert again[:2] == expected[:2]
    model = make_model()
    loss = passes(model).run(Silent())
    assert loss.loss_count == 2
    assert rng_draws() == again


def test_gradients_stay_as_they_were(make_model: MakeModel) -> None:
    model = make_model()
    parameters = list(model.parameters())
    kept = torch.ones_like(parameters[0])
    parameters[0].grad = kept
    passes(model).run(Silent())
    assert parameters[0].grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert all(p.grad is None for p in parameters[1:])


def test_buffers_come_back(make_model: MakeModel) -> None:
    model = make_model(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
    )
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert any("local_tokens_per_expert" in name for name in before)  # counted in every forward
    passes(model).run(Silent())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    training(model).train()
    counted = dict(model.named_buffers())
    assert any(not torch.equal(counted[name], before[name]) for name in before)


def test_logged_auxiliary_losses_are_not_counted(make_model: MakeModel) -> None:
    model = make_model(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.1,
    )
    moe_utils.get_moe_layer_wise_logging_tracker().clear()

    def logged() -> dict[str, list[float]]:
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        return {name: entry["values"].tolist() for name, entry in tracker.items()}

    passes(model).run(Silent())
    assert all(set(values) == {0.0} for values in logged().values())  # begun by the pass
    training(model).train()
    before = logged()
    assert any(any(values) for values in before.values())
    passes(model).run(Silent())
    assert logged() == before
    moe_utils.get_moe_layer_wise_logging_tracker().clear()


def test_schedule_hooks_are_off_during_a_pass_and_back_after_it(make_model: MakeModel) -> None:
    model = make_model()
    called: list[str] = []
    model.config.finalize_model_grads_func = lambda *a, **k: called.append("finalize")
    hook = model.config.finalize_model_grads_func
    passes(model).run(Silent())
    assert called == []
    assert model.config.finalize_model_grads_func is hook
    training(model).train()
    assert called == ["finalize"]


def test_everything_comes_back_when_a_pass_fails(make_model: MakeModel) -> None:
    model = make_model()
    expected = rng_draws()
    model = make_model()
    hook = model.config.finalize_model_grads_func = lambda *a, **k: None
    runtime = Runtime(Topology(), 0)

    def failing(data: Any, chunk: Any) -> Any:
        forward_step(data, chunk)
        raise MemoryError

    runner = MeasuringPasses(training(model, forward_step_func=failing), runtime, 1)
    with pytest.raises(MemoryError):
        runner.run(Silent())
    assert (runtime.mode, runtime.observer) == (Mode.PLAN, None)
    assert model.config.finalize_model_grads_func is hook
    assert rng_draws()[:2] == expected[:2]
    assert all(p.grad is None for p in model.parameters())


def test_passes_see_the_same_microbatches_and_training_sees_them_again(
    make_model: MakeModel,
) -> None:
    model = make_model(hidden_dropout=0.0)
    step = training(model)
    runner = MeasuringPasses(step, Runtime(Topology(), 0), 2)
    first, second = runner.run(Silent()), runner.run(Silent())
    assert first == second
    losses = [float(r["lm loss"]) for r in step.train()]
    assert len(losses) == 4
    assert first.loss_sum == pytest.approx(sum(losses[:2]))


def test_other_tensor_ranks_leave_the_loss_to_the_first(make_model: MakeModel) -> None:
    found = passes(make_model(), topology=Topology(tensor=TensorAxis(1, 2))).run(Silent())
    assert (found.loss_sum, found.loss_count) == (0.0, 0)


def reported(values: Any) -> float:
    from megatron_snip.linears.passes import _losses

    return _losses([{"lm loss": values}], Topology()).loss_sum


def test_losses_are_read_in_every_form_that_scripts_report() -> None:
    assert reported(torch.tensor(2.5)) == 2.5
    assert reported(torch.tensor([30.0, 12.0])) == 2.5  # sum over tokens, tokens
    assert reported((torch.tensor(30.0), torch.tensor(12))) == 2.5
    assert reported([30.0, 0]) == 30.0  # all masked


@pytest.mark.parametrize(("wanted", "count"), [(1, 1), (3, 3), (9, 4)])
def test_at_most_the_step_s_own_microbatches(
    make_model: MakeModel, wanted: int, count: int
) -> None:
    assert passes(make_model(), wanted).num_microbatches == count


def test_interleaved_schedules_take_whole_groups(make_model: MakeModel) -> None:
    model = make_model()
    chunks = SimpleNamespace(
        chunks=[model, model], kwargs={"num_microbatches": 8}, data=None, function=None
    )
    runtime = Runtime(Topology(num_stages=4), 0)
    for group, wanted, count in ((4, 1, 4), (4, 5, 8), (2, 3, 4), (4, 99, 8), (None, 1, 4)):
        model.config.microbatch_group_size_per_vp_stage = group
        runner = MeasuringPasses(chunks, runtime, wanted)  # type: ignore[arg-type]
        assert runner.num_microbatches == count


def test_gradients_are_scaled_to_the_mean_over_the_batch(make_model: MakeModel) -> None:
    model = make_model()
    topology = Topology(data=DataAxis(0, 4))
    assert passes(model, 2, topology).grad_scale == 1 / 4
    model.config.grad_scale_func = lambda loss: loss * 1024.0
    assert passes(model, 2, topology).grad_scale == 1 / 4096
    model.config.calculate_per_token_loss = True  # divided by tokens after the backward only
    tokens = 2 * BATCH * SEQUENCE
    assert passes(model, 2, topology).grad_scale == pytest.approx(1 / 4096 / tokens)


def test_g_times_the_scale_is_the_gradient_of_the_mean_loss(make_model: MakeModel) -> None:
    """By a small change of one linear's output: for both ways to divide."""
    for per_token in (False, True):
        model = make_model(hidden_dropout=0.0, calculate_per_token_loss=per_token)
        model.config.grad_scale_func = lambda loss: loss * 8.0
        seen: list[torch.Tensor] = []
        bump = {"size": 0.0}

        class Bumping:
            def observe(self, placement: Any, x: Any, w: Any, y: Any, sp: bool) -> Any:
                if placement != "here":
                    return y
                direction = torch.linspace(-1, 1, y.numel()).view_as(y)
                y = y + bump["size"] * direction  # noqa: B023
                y.register_hook(lambda g: seen.append((g * direction).sum()))  # noqa: B023
                return y

        step = training(model, 2, forward_step_func=sums if per_token else forward_step)
        runtime = Runtime(Topology(), 0)
        runner = MeasuringPasses(step, runtime, 2)
        from megatron_snip.linears.seam import PlannedLinear

        linear: Any = model.decoder.layers[1].mlp.linear_fc2
        planned = PlannedLinear(linear, "here", runtime)  # type: ignore[arg-type]
        planned.install()
        means = []
        for size in (-3e-4, 3e-4, 0.0):
            bump["size"] = size
            seen.clear()
            result = runner.run(Bumping())
            means.append(result.loss_sum / result.loss_count)
        planned.uninstall()
        slope = (means[1] - means[0]) / 6e-4
        total = float(torch.stack(seen).sum()) * runner.grad_scale
        assert total == pytest.approx(slope, rel=2e-2)


def sums(data: Any, model: Any) -> Any:
    """A forward step that reports sums and tokens, as per-token losses need."""
    output, _ = forward_step(data, model)

    def loss(values: torch.Tensor) -> Any:
        total, tokens = values.float().sum(), torch.tensor(values.numel(), dtype=torch.int)
        report = torch.stack([total.detach(), tokens.float()])
        return total, tokens, {"lm loss": report}

    return output, loss


def test_only_what_is_not_finite_is_kept_from_the_rerun_state_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core import rerun_state_machine

    class Machine:
        def __init__(self) -> None:
            self.heard: list[float] = []

        def validate_result(self, result: Any, rejection_func: Any, message: str) -> None:
            self.heard.append(float(result))

    machine = Machine()
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    with tolerating_non_finite():
        for result in (torch.tensor(1.0), torch.tensor(float("nan")), float("inf"), 2.0):
            machine.validate_result(result, torch.isnan, message="loss")
    machine.validate_result(torch.tensor(float("inf")), torch.isnan, "loss")
    assert machine.heard == [1.0, 2.0, float("inf")]
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", None)
    with tolerating_non_finite():
        pass  # nobody validates
