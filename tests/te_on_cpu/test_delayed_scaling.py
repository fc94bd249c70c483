"""A plan that changes a linear's recipe leaves the history of delayed scaling intact."""

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as built_in
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megatron_snip.linears.snapshot import TrainingStateSnapshot
from megatron_snip.linears.te.history import delayed_scales, scaling_states
from megatron_snip.linears.te.linear import reset_quantizers
from tests.te_on_cpu import probe

probe.install()
JOB = built_in.DelayedScaling(
    fp8_format=built_in.Format.HYBRID, amax_history_len=4, amax_compute_algo="max"
)
OTHERS = {
    "bf16": None,
    "mxfp8": built_in.MXFP8BlockScaling(),
    "nvfp4": built_in.NVFP4BlockScaling(),
    "tensorwise": built_in.Float8CurrentScaling(),
}


def two_linears() -> list[Any]:
    torch.manual_seed(0)
    return [te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16) for _ in range(2)]


def step(linears: list[Any], number: int, second: Any = JOB) -> None:
    """One microbatch in the job's autocast; the second linear may run another recipe."""
    generator = torch.Generator().manual_seed(number)
    x = (torch.randn(32, 64, generator=generator) * 2.0**number).bfloat16().requires_grad_()
    for linear in linears:
        linear._fp8_workspaces.clear()
    with te.fp8_autocast(enabled=True, fp8_recipe=JOB):
        y = linears[0](x)
        with te.fp8_autocast(enabled=second is not None, fp8_recipe=second or JOB):
            y = linears[1](y)
    y.backward(torch.full_like(y, 1e-4 * 2.0**-number))


@pytest.fixture(autouse=True)
def no_earlier_modules() -> None:
    FP8GlobalStateManager.reset()


@pytest.mark.parametrize("other", OTHERS)
def test_scales_continue_after_another_recipe(other: str) -> None:
    """They are updated again, from the tensors that the linear then has; its peer is untouched."""
    linears = two_linears()
    for number in range(3):
        step(linears, number)
    before = delayed_scales(linears[1])
    assert before is not None and (before != 1.0).all()
    before = before.clone()
    reset_quantizers(linears[1])
    for number in range(3, 5):
        step(linears, number, OTHERS[other])
    if other != "bf16":
        assert delayed_scales(linears[1]) is None and linears[1].seen[-1][0] == other
    reset_quantizers(linears[1])
    resumed = delayed_scales(linears[1])
    assert resumed is not None
    # Amaxes of 0 leave the history and the scales, as in a module that did not run.
    assert torch.equal(resumed, before)
    for number in range(5, 7):
        step(linears, number)
    after = delayed_scales(linears[1])
    assert after is not None and linears[1].seen[-1] == ("delayed",) * 3
    # The weight has not changed.
    assert (after != before).tolist() == [True, False, True]


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_step_that_is_undone_leaves_no_trace_in_the_history(num_before: int) -> None:
    """Infinite elements would hold the scales for as long as the history is."""

    def histories(is_undone: bool) -> list[torch.Tensor]:
        FP8GlobalStateManager.reset()
        linears = two_linears()
        for number in range(num_before):
            step(linears, number)
        if is_undone:
            snapshot = TrainingStateSnapshot(linears)
            reset_quantizers(linears[1])
            step(linears, 140, OTHERS["tensorwise"])  # 2^140 is infinite
            assert any(state.amax_history.isinf().any() for state in scaling_states(linears[0]))
            reset_quantizers(linears[1])
            snapshot.restore()
        for number in range(num_before, num_before + 2):
            step(linears, number)
        states = [state for linear in linears for state in scaling_states(linear)]
        return [tensor for state in states for tensor in (state.amax_history, state.scale)]

    for found, wanted in zip(histories(True), histories(False), strict=True):
        assert torch.equal(found, wanted)
