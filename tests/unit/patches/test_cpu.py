"""The CPU layer: its answers, and an uninstallation that puts back every object."""

import os
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import datasets
from megatron.core.datasets import utils as dataset_utils
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp_buffer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer import torch_norm
from megatron.core.transformer.moe import moe_utils
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from megatron_snip.patches import cpu
from megatron_snip.patches.cpu.megatron import megatron_replacements

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the patch does nothing where CUDA is available"
)

OWNERS = (
    torch.Tensor,
    torch.autograd,
    torch.cuda,
    torch.cuda.random,
    torch.cuda.nvtx,
    torch.accelerator,
    dist,
    dataset_utils,
    param_and_grad_buffer,
    fsdp_buffer,
    schedules,
    tensor_parallel_random,
    moe_utils,
    torch_norm.WrappedTorchNorm,
    distrib_optimizer.DistributedOptimizer,
    _BaseDataLoaderIter,
)


def snapshot() -> dict[tuple[Any, str], Any]:
    return {(owner, name): value for owner in OWNERS for name, value in vars(owner).items()}


def changed(before: dict[tuple[Any, str], Any]) -> set[str]:
    after = snapshot()
    return {key[1] for key in before | after if before.get(key) is not after.get(key)}


class Quantized(torch.Tensor):
    """A tensor without storage, as Transformer Engine's are."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def patched() -> Iterator[None]:
    assert cpu.install()
    yield
    cpu.uninstall()


def test_uninstall_puts_back_the_very_objects() -> None:
    before = snapshot()
    cpu.install()
    cpu.install()  # once more changes nothing
    assert {"current_device", "_lazy_call", "__new__", "all_gather"} <= changed(before)
    cpu.uninstall()
    assert changed(before) == set()
    assert not cpu.is_installed()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


@pytest.mark.usefixtures("patched")
def test_nothing_is_compiled() -> None:
    assert torch.compile(snapshot) is snapshot
    assert torch.compile(dynamic=True)(snapshot) is snapshot


@pytest.mark.usefixtures("patched")
def test_a_tensor_may_be_used_in_any_stream() -> None:
    torch.ones(1).record_stream(torch.cuda.Stream())


@pytest.mark.usefixtures("patched")
def test_the_current_device_is_an_index_of_the_cpu() -> None:
    index = torch.cuda.current_device()
    assert type(index) is int
    named = [
        torch.device("cuda", index),
        torch.device("cuda", index=index),
        torch.device(type="cuda", index=index),
        torch.device(f"cuda:{index}"),
        torch.device(index),
    ]
    assert named == [torch.device("cpu")] * len(named)
    assert torch.device("cpu").type == "cpu" and torch.device("meta").type == "meta"
    made = torch.Tensor._make_wrapper_subclass(Quantized, (2, 2), device=index)
    assert made.device.type == "cpu"


@pytest.mark.usefixtures("patched")
def test_cuda_devices_mean_the_cpu() -> None:
    device = torch.cuda.current_device()
    made = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device="cuda:1"),
        torch.empty(2, device=device),
        torch.arange(3, device=0, pin_memory=True),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda"),
        torch.ones(2).to(torch.device("cuda", 0), torch.bfloat16),
        torch.ones(2).to(device="cuda", dtype=torch.bfloat16),
        torch.nn.Linear(2, 2).cuda().weight,
    ]
    assert {t.device.type for t in made} == {"cpu"}
    assert made[6].dtype is made[7].dtype is torch.bfloat16
    assert torch.ones(2).to(torch.int64).dtype is torch.int64
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).type("torch.cuda.BFloat16Tensor").dtype is torch.bfloat16
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.cuda.Event().query()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("place", ["cuda", "cuda:0", torch.device("cuda", 0), None])
def test_a_file_is_loaded_to_the_cpu(place: Any, tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "file")
    loaded = torch.load(tmp_path / "file", map_location=place)
    assert loaded["x"].device.type == "cpu"
    assert torch.load(tmp_path / "file", f"cuda:{torch.cuda.current_device()}").keys() == {"x"}


@pytest.mark.parametrize("flags", [None, "--no-print-directory"])
def test_dataset_helpers_are_named_for_the_python_that_runs(
    flags: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's Makefile asks `python3-config`, which may be that of another Python."""
    makefile = "LIBEXT = .cpython-36.so\nhelpers:\n\ttouch helpers_cpp$(LIBEXT)\n"
    (tmp_path / "Makefile").write_text(makefile)
    monkeypatch.setattr(datasets, "__path__", [str(tmp_path)])
    monkeypatch.setattr(dataset_utils, "__file__", str(tmp_path / "utils.py"))
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("MAKEFLAGS", flags)
    replacements = {(owner, name): value for owner, name, value in megatron_replacements()}
    replacements[dataset_utils, "compile_helpers"]()
    assert (tmp_path / f"helpers_cpp{EXTENSION_SUFFIXES[0]}").exists()
    assert os.environ.get("MAKEFLAGS") == flags


@pytest.mark.usefixtures("patched")
def test_a_pipeline_frees_no_output_that_gloo_may_still_send() -> None:
    model = SimpleNamespace(config=SimpleNamespace(deallocate_pipeline_outputs=True))
    assert not schedules.get_model_config(model).deallocate_pipeline_outputs


class NamesCudaInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.full((), 3.0, device="cuda")


@pytest.fixture
def one_rank(patched: None) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("importer", [param_and_grad_buffer, fsdp_buffer, dist])
def test_weights_of_several_types_are_gathered_together(
    one_rank: dist.ProcessGroup, importer: Any
) -> None:
    """gloo alone reads all of them as the first one's type."""
    given = [torch.arange(8, dtype=torch.uint8), torch.linspace(-1, 1, 8).bfloat16()]
    found = [torch.zeros_like(each) for each in given]
    with importer._coalescing_manager(one_rank, async_ops=True) as work:
        for output, shard in zip(found, given, strict=True):
            dist.all_gather_into_tensor(output, shard, group=one_rank, async_op=True)
    work.wait()
    assert all(map(torch.equal, found, given))


def test_collectives_that_run_as_one_do_not_share_gloos_threads(
    one_rank: dist.ProcessGroup,
) -> None:
    """Names of coalesced operations crash a process that has two of them in flight."""
    x = torch.arange(4.0)
    scattered, gathered, reduced = torch.zeros(4), torch.zeros(4), x.clone()
    calls: list[Callable[[], Any]] = [
        lambda: dist.reduce_scatter_tensor(scattered, x, op=dist.ReduceOp.SUM),
        lambda: dist.all_gather_into_tensor(gathered, x),
        lambda: dist.all_reduce(reduced, op=dist.ReduceOp.MAX),
    ]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for call in calls:
            with dist._coalescing_manager():
                call()
    assert all(torch.equal(found, x) for found in (scattered, gathered, reduced))
    assert not [event.name for event in profile.events() if "coalesced" in event.name]


@pytest.mark.usefixtures("patched")
def test_cuda_devices_mean_the_cpu_in_python_backwards() -> None:
    x = torch.ones(2, requires_grad=True)
    NamesCudaInBackward.apply(x).sum().backward()
    torch.autograd.backward(NamesCudaInBackward.apply(x), torch.ones(2))
    (third,) = torch.autograd.grad(NamesCudaInBackward.apply(x).sum(), x)
    assert x.grad is not None and x.grad.tolist() == [6.0, 6.0] and third.tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("patched")
def test_a_bf16_product_is_the_fp32_product_rounded_once() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 96).bfloat16(), torch.randn(32, 96).bfloat16()
    exact = x.double() @ w.double().t()
    step = 2.0 ** (torch.floor(torch.log2(exact.abs())) - 7)  # BF16: 8 bits of significand
    for product in (x @ w.t(), torch.nn.functional.linear(x, w), torch.mm(x, w.t())):
        assert product.dtype is torch.bfloat16
        # half a step of rounding, and what FP32 summation adds to it
        assert ((product.double() - exact).abs() <= 0.5 * step + 1e-4).all()
    garbage = torch.full((2, 64, 32), torch.nan, dtype=torch.bfloat16)
    batch = torch.baddbmm(garbage, x.expand(2, -1, -1), w.t().expand(2, -1, -1), beta=0.0)
    assert torch.equal(batch[1], x @ w.t())
    out = torch.empty(64, 32, dtype=torch.bfloat16)
    assert torch.matmul(x, w.t(), out=out) is out and torch.equal(out, x @ w.t())
    assert (x.float() @ w.float().t()).dtype is torch.float32


def draws_of_a_loader() -> bool:
    before = torch.get_rng_state()
    next(iter(DataLoader(TensorDataset(torch.zeros(4)))))
    return not torch.equal(torch.get_rng_state(), before)


def test_a_data_loader_draws_nothing_from_the_generator_of_dropout(patched: None) -> None:
    assert not draws_of_a_loader()
    cpu.uninstall()
    assert draws_of_a_loader()
