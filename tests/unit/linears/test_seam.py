"""The override on the instance: put on, taken off, passed through, refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_snip.linears.backends import Backend, Machine
from megatron_snip.linears.seam import PlannedLinear

from megatron_snip.linears import gemms, native
from megatron_snip.linears.runtime import Mode, Runtime
from megatron_snip.log import forget_warnings
from megatron_snip.options import Option
from megatron_snip.topology import Placement, Topology

PLACEMENT = Placement("decoder.layers.0.mlp.linear_fc2", 0, "row", 64, 48)
FP4 = Option.uniform("fp4")


class Linear(torch.nn.Module):
    """What the seam sees of Megatron's linears."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(48, 64))
        self.calls: list[dict[str, Any]] = []

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return input @ weight.t()

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return self._forward_impl(input=x, weight=self.weight, bias=None, **kwargs)


def planned() -> tuple[Linear, PlannedLinear, Runtime]:
    torch.manual_seed(0)
    module, runtime = Linear(), Runtime(Topology(), seed=0)
    linear = PlannedLinear(module, PLACEMENT, runtime)
    linear.install()
    return module, linear, runtime


def test_installing_and_undoing_twice_changes_nothing() -> None:
    module, linear, _ = planned()
    installed = module.__dict__["_forward_impl"]
    linear.install()
    assert module.__dict__["_forward_impl"] is installed
    linear.uninstall()
    linear.uninstall()
    assert "_forward_impl" not in module.__dict__
    linear.install()
    assert "_forward_impl" in module.__dict__


def test_another_s_override_is_neither_displaced_nor_removed() -> None:
    module, linear, _ = planned()
    linear.uninstall()
    module._forward_impl = lambda **_: torch.zeros(1)  # type: ignore[method-assign]
    theirs = module._forward_impl
    with pytest.raises(RuntimeError, match="is already overridden"):
        linear.install()
    linear.uninstall()
    assert module.__dict__["_forward_impl"] is theirs


def test_bf16_passes_everything_on_untouched() -> None:
    module, _, _ = planned()
    x = torch.randn(5, 64)
    kwargs = {"sequence_parallel": False, "tp_group": None, "something_new": 7}
    assert torch.equal(module(x, **kwargs), x @ module.weight.t())
    assert module.calls == [{"bias": None, **kwargs}]


def test_an_option_replaces_the_gemms() -> None:
    module, linear, _ = planned()
    linear.option = FP4
    x = torch.randn(5, 64)
    assert torch.equal(module(x), gemms.fprop(x, module.weight.detach(), FP4))
    assert module.calls == []


def test_bf16_mode_runs_the_original() -> None:
    module, linear, runtime = planned()
    linear.option = FP4
    x = torch.randn(5, 64)
    with runtime.running(Mode.BF16):
        assert torch.equal(module(x), x @ module.weight.t())


def test_an_observer_sees_what_the_plan_runs() -> None:
    module, linear, runtime = planned()
    linear.option = FP4
    x = torch.randn(5, 64)
    seen: list[Any] = []

    class Observer:
        def observe(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append((args, kwargs))
            output: torch.Tensor = args[3]
            return output + 1

    with runtime.observed_by(Observer()):
        output = module(x)
    wanted = gemms.fprop(x, module.weight.detach(), FP4)
    assert torch.equal(output, wanted + 1)
    ((args, kwargs),) = seen
    assert args[0] is PLACEMENT and args[1] is x and args[2] is module.weight
    assert kwargs == {"input_is_split": False}
    assert torch.equal(module(x), wanted)


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"grad_output_buffer": []}, "its weight gradient is deferred"),
        ({"gtp_remat_size": 2}, "its weight is gathered inside the GEMM"),
    ],
)
def test_what_the_emulation_does_not_do_stays_bf16_and_says_so_once(
    kwargs: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    forget_warnings()
    module, linear, _ = planned()
    linear.option = FP4
    x = torch.randn(5, 64)
    for _ in range(2):
        assert torch.equal(module(x, **kwargs), x @ module.weight.t())
    (record,) = caplog.records
    assert why in record.getMessage() and PLACEMENT.name in record.getMessage()
    assert torch.equal(module(x, gtp_remat_size=1), gemms.fprop(x, module.weight.detach(), FP4))


def backward(module: Linear, microbatches: int) -> list[torch.Tensor]:
    grads = []
    for _ in range(microbatches):
        x = torch.ones(5, 64, requires_grad=True)
        module(x).backward(torch.linspace(-1, 1, 5 * 48).view(5, 48))
        assert x.grad is not None
        grads.append(x.grad)
    return grads


def test_microbatches_draw_apart_and_a_repeated_step_replays() -> None:
    module, linear, runtime = planned()
    linear.option = FP4
    runtime.begin_pass(3)
    first = backward(module, 2)
    assert not torch.equal(first[0], first[1])
    runtime.begin_pass(3)
    again = backward(module, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    runtime.begin_pass(4)
    other = backward(module, 2)
    assert not torch.equal(first[0], other[0])


def test_forwards_without_a_backward_count_for_nothing() -> None:
    """An evaluation between two microbatches leaves the streams alone."""
    module, linear, runtime = planned()
    linear.option = FP4
    runtime.begin_pass(3)
    plain = backward(module, 2)
    runtime.begin_pass(3)
    first = backward(module, 1)
    with torch.no_grad():
        module(torch.ones(5, 64))
    assert torch.equal(backward(module, 1)[0], plain[1])
    assert torch.equal(first[0], plain[0])


def test_backends_mix_by_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper `auto` runs what it can natively; elsewhere everything is simulated."""
    seen: list[str] = []
    for kind in ("fprop", "dgrad", "wgrad"):
        for who, module in (("native", native), ("simulated", gemms)):
            monkeypatch.setattr(module, kind, spy(getattr(module, kind), f"{kind} {who}", seen))
    for option, recipe, calls in [
        ("fp8", "native", ["fprop native", "dgrad native", "wgrad native"]),
        (
            "fp4-mxfp8-bf16",
            "native-simulated-megatron",
            ["fprop native", "dgrad simulated", "wgrad simulated"],
        ),
        (
            "bf16-nvfp4-fp3",
            "megatron-simulated-native",
            ["fprop simulated", "dgrad simulated", "wgrad native"],
        ),
    ]:
        torch.manual_seed(0)
        module = Linear()
        linear = PlannedLinear(module, PLACEMENT, Runtime(Topology(), 0), "auto", Machine((9, 0)))
        linear.install()
        linear.option = Option.parse(option)
        assert (linear.recipe, linear.backend) == (recipe, Backend.NATIVE)
        assert f"snip {option}, {recipe}" in repr(module)
        seen.clear()
        x = torch.randn(5, 64, requires_grad=True)
        module(x).sum().backward()
        assert seen == calls
        assert linear.refusal(Option.uniform("mxfp4")) is None
    elsewhere = PlannedLinear(Linear(), PLACEMENT, Runtime(Topology(), 0), "auto", Machine((10, 0)))
    elsewhere.option = FP4
    assert (elsewhere.recipe, elsewhere.backend) == ("simulated", Backend.SIMULATE)


def spy(function: Any, name: str, seen: list[str]) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return function(*args, **kwargs)

    return wrapped


def test_native_refuses_what_it_cannot_run() -> None:
    runtime = Runtime(Topology(), 0)
    linear = PlannedLinear(Linear(), PLACEMENT, runtime, "native", Machine((9, 0)))
    assert linear.refusal(Option.uniform("fp8")) is None
    reason = linear.refusal(Option("fp8", "mxfp8", "fp8"))
    assert reason is not None and "mxfp8 on compute capability 9.0" in reason


def test_native_results_differ_from_simulated_ones_by_rounding_alone() -> None:
    results = []
    for choice in ("simulate", "native"):
        torch.manual_seed(0)
        module, runtime = Linear(), Runtime(Topology(), seed=0)
        linear = PlannedLinear(module, PLACEMENT, runtime, choice, Machine((9, 0)))
        linear.option = FP4
        linear.install()
        runtime.begin_pass(0)
        x = torch.randn(40, 64, requires_grad=True)
        y = module(x)
        y.backward(torch.linspace(-1, 1, 40 * 48).view(40, 48))
        results.append((y.detach(), x.grad, module.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", ["simulate", "native"])
def test_a_step_quantizes_each_weight_once(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over microbatches and over fprop and dgrad; bits are those of quantizing every time."""
    made: list[Any] = []
    source, name = (
        (gemms, "quantize_dequantize_operand")
        if choice == "simulate"
        else (native, "quantize_payload_operand")
    )
    original = getattr(source, name)

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.shape == (48, 64):
            made.append(args)
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(source, name, counted)
    torch.manual_seed(0)
    module, runtime = Linear(), Runtime(Topology(), seed=0)
    linear = PlannedLinear(module, PLACEMENT, runtime, choice, Machine((9, 0)))
    linear.option = FP4
    linear.install()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    forms = 1 if choice == "simulate" else 2  # native keeps the transposed bytes beside
    for step in range(2):
        runtime.begin_pass(step)
        made.clear()
        backward(module, 3)
        assert len(made) == forms
        held = runtime.kept.nbytes
        assert held == (48 * 64 * 4 if choice == "simulate" else pytest.approx(2 * 48 * 64, 0.02))
        optimizer.step()
        assert runtime.kept.nbytes == 0
    module.eval()
    runtime.begin_pass(2)
    made.clear()
    with torch.no_grad():
        module(torch.ones(5, 64))
    assert len(made) == 1 and runtime.kept.nbytes == 0


@pytest.mark.parametrize("choice", ["simulate", "native"])
def test_a_plan_switch_between_steps_takes_effect_at_once(choice: str) -> None:
    """Kept forms of the old option are not taken for the new one's."""
    module, runtime = Linear(), Runtime(Topology(), seed=0)
    linear = PlannedLinear(module, PLACEMENT, runtime, choice, Machine((9, 0)))
    linear.install()
    x = torch.randn(5, 64)
    runtime.begin_pass(0)
    for option in (FP4, Option.uniform("fp8"), Option("fp8", "fp4", "fp4"), FP4):
        linear.option = option
        wanted = gemms.fprop(x, module.weight.detach(), option)
        torch.testing.assert_close(module(x), wanted, rtol=1e-5, atol=1e-5)
