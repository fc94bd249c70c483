"""The override on the instance: installed, removed, bypassed; streams, cache and observers."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_snip.linears import quantized_linear as gemms
from megatron_snip.linears.megatron_linear import SimulatedMegatronLinear
from megatron_snip.linears.runtime import Runtime
from megatron_snip.log import forget_warnings
from megatron_snip.options import Option
from megatron_snip.quantizers.quantize import quantize_dequantize_operand
from megatron_snip.topology import Axis, Placement, Topology
from megatron_snip.types import Gemm, Operand

PLACEMENT = Placement("decoder.layers.0.mlp.linear_fc2", 0, "row", 64, 48)
FP4 = Option.uniform("fp4")


class Linear(torch.nn.Module):
    """What the override sees of Megatron's linears."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(48, 64))
        self.config: Any = None
        self.calls: list[dict[str, Any]] = []

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return input @ weight.t()

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return self._forward_impl(input=x, weight=self.weight, bias=None, **kwargs)


def planned(config: Any = None) -> tuple[Linear, SimulatedMegatronLinear, Runtime]:
    torch.manual_seed(0)
    module, runtime = Linear(), Runtime(Topology(), seed=0)
    module.config = config
    linear = SimulatedMegatronLinear(module, [PLACEMENT], runtime)
    linear.option = FP4
    linear.install()
    return module, linear, runtime


def simulated(module: Linear, x: torch.Tensor, option: Option = FP4) -> torch.Tensor:
    x_q = quantize_dequantize_operand(
        x, option.fprop, Operand.INPUT, Gemm.FPROP, dtype=torch.float32
    )
    return gemms.fprop_or_dgrad_gemm(x_q, module.weight.detach(), Gemm.FPROP, option, x.dtype)


def test_another_override_is_neither_replaced_nor_removed() -> None:
    module, linear, _ = planned()
    linear.uninstall()
    module._forward_impl = lambda **_: torch.zeros(1)  # type: ignore[method-assign]
    theirs = module._forward_impl
    with pytest.raises(RuntimeError, match="is already overridden"):
        linear.install()
    linear.uninstall()
    assert module.__dict__["_forward_impl"] is theirs


def test_bf16_calls_megatron_with_all_arguments_and_an_option_does_not() -> None:
    module, linear, runtime = planned()
    x = torch.randn(5, 64)
    kwargs = {"sequence_parallel": False, "tp_group": None, "something_new": 7}
    assert torch.equal(module(x), simulated(module, x)) and module.calls == []
    with runtime.running_in_bf16():
        assert torch.equal(module(x, **kwargs), x @ module.weight.t())
    linear.option = Option.uniform("bf16")
    assert torch.equal(module(x, **kwargs), x @ module.weight.t())
    assert module.calls == [{"bias": None, **kwargs}] * 2


def test_an_observer_sees_what_the_plan_runs() -> None:
    module, _, runtime = planned()
    x = torch.randn(5, 64)
    observer = mock.Mock()
    observer.observe.side_effect = lambda *args, **_: args[3] + 1
    with runtime.observed_by(observer):
        assert torch.equal(module(x), simulated(module, x) + 1)
    ((args, kwargs),) = observer.observe.call_args_list
    assert args[0] is PLACEMENT and args[1] is x and args[2] is module.weight
    assert kwargs == {"input_is_split": False}


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"grad_output_buffer": []}, "its weight gradient is deferred"),
        ({"gtp_remat_size": 2}, "its weight is gathered inside the GEMM"),
    ],
)
def test_an_unsupported_call_runs_in_bf16_with_one_warning(
    kwargs: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    forget_warnings()
    module, _, _ = planned()
    x = torch.randn(5, 64)
    for _ in range(2):
        assert torch.equal(module(x, **kwargs), x @ module.weight.t())
    (record,) = caplog.records
    assert reason in record.getMessage() and PLACEMENT.name in record.getMessage()
    assert torch.equal(module(x, gtp_remat_size=1), simulated(module, x))


def backward(module: Linear, microbatches: int) -> list[torch.Tensor]:
    grads = []
    for _ in range(microbatches):
        x = torch.ones(5, 64, requires_grad=True)
        module(x).backward(torch.linspace(-1, 1, 5 * 48).view(5, 48))
        assert x.grad is not None
        grads.append(x.grad)
    return grads


def test_microbatches_draw_different_numbers_and_a_repeated_step_the_same() -> None:
    module, _, runtime = planned()
    with runtime.training_pass(3):
        first = backward(module, 2)
    assert not torch.equal(first[0], first[1])
    with runtime.training_pass(3):
        again = backward(module, 1)
        with torch.no_grad():  # a forward alone draws nothing
            module(torch.ones(5, 64))
        again += backward(module, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with runtime.training_pass(4):
        assert not torch.equal(first[0], backward(module, 1)[0])


def test_a_training_pass_quantizes_each_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over microbatches, and over fprop and dgrad; outside of a pass nothing is cached."""
    made: list[Any] = []
    original = gemms.quantize_dequantize_operand

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.shape == (48, 64):
            made.append(args)
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(gemms, "quantize_dequantize_operand", counted)
    module, _, runtime = planned()
    x = torch.ones(5, 64)
    for step in range(2):
        made.clear()
        with runtime.training_pass(step):
            backward(module, 3)
            assert len(made) == 1
            with torch.no_grad():
                module.weight.mul_(0.5)  # as a loop that steps its optimizer in a pass does
            assert torch.equal(module(x), simulated(module, x))
        with torch.no_grad():
            module.weight.mul_(-3.0)  # as an optimizer does
            assert torch.equal(module(x), simulated(module, x))
            assert torch.equal(module(x), simulated(module, x))


def test_a_new_option_applies_to_the_next_forward() -> None:
    """The cached weight of the old option is not used for the new one."""
    module, linear, runtime = planned()
    x = torch.randn(5, 64)
    with runtime.training_pass(0):
        for option in (FP4, Option.uniform("fp8"), Option("fp8", "fp4", "fp4"), FP4):
            linear.option = option
            assert torch.equal(module(x), simulated(module, x, option))


@pytest.mark.parametrize(
    ("config", "saves_x"),
    [
        ({}, False),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, False),
        ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, True),
        ({"cpu_offloading": True}, True),
    ],
)
def test_x_itself_is_saved_where_megatron_frees_it(config: dict[str, Any], saves_x: bool) -> None:
    x = torch.randn(5, 64)
    module, _, _ = planned(config=SimpleNamespace(**config))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(x)
    assert (saved[1].data_ptr() == x.data_ptr()) == saves_x


def test_what_fails_leaves_no_observer_and_no_cache() -> None:
    runtime = Runtime(Topology(), seed=0)
    observer: Any = object()

    def fail() -> None:
        with runtime.observed_by(observer), runtime.training_pass(1), runtime.running_in_bf16():
            assert runtime.observer is observer and runtime.runs_in_bf16("any")
            assert runtime.weight_cache(PLACEMENT) is not None
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert runtime.observer is None and not runtime.runs_in_bf16("any")
    assert runtime.weight_cache(PLACEMENT) is None


def test_streams_count_microbatches_over_data_ranks() -> None:
    def keys(placement: Placement, rank: int) -> list[Any]:
        runtime = Runtime(Topology(data=Axis(rank, 3), expert_data=Axis(1, 2)), seed=9)
        with runtime.training_pass(4):
            return [runtime.next_stream(placement).key for _ in range(4)]

    found = [key for rank in range(3) for key in keys(PLACEMENT, rank)]
    assert {(key.iteration, key.seed) for key in found} == {(4, 9)}
    assert [key.microbatch for key in found] == [3 * m + r for r in range(3) for m in range(4)]
    assert len({key.word for key in found}) == 12
    expert = Placement("decoder.layers.0.mlp.experts.linear_fc2", 0, "row", 64, 48, expert=5)
    assert [key.microbatch for key in keys(expert, 2)] == [1, 3, 5, 7]
