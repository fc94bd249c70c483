"""A world of N ranks in one process: process groups without communication, tensors without memory.

torch's fake backend answers every collective at once. A rank of it has the groups that the rank of
a job has, so Megatron's own code builds the model of any rank. Parameters are on the meta device.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_snip.errors import UsageError
from megatron_snip.patches import cpu
from megatron_snip.patches.cpu.device import constant
from megatron_snip.patches.cpu.tensors import is_cuda
from megatron_snip.patches.registry import replace_attribute

META = torch.device("meta")

_RANK_GROUPS = "generate_masked_orthogonal_rank_groups"


class World:
    """The ranks of a job, of which this process is one at a time.

    Attributes:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._layout: tuple[Any, ...] | None = None
        self._rank_groups: dict[Any, Any] = {}

    def enter(self, rank: int) -> None:
        """Be a rank from now on, with its groups if `initialize_model_parallel` was called."""
        from megatron.core import parallel_state
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        dist.distributed_c10d.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=self.size
        )
        if self._layout is not None:
            self._make_groups()

    def start(self, **layout: int) -> None:
        """Be rank 0 of a layout: the arguments are those of `initialize_model_parallel`."""
        from megatron.core import parallel_state

        self.enter(0)
        parallel_state.initialize_model_parallel(**layout)

    def pipeline_ranks(self) -> list[int]:
        """Return the rank of each pipeline stage, among the ranks that this one pipes with."""
        from megatron.core import parallel_state

        return dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block, what starts torch.distributed and Megatron's groups starts these."""
        from megatron.core import parallel_state

        # Before it is replaced: `enter` calls torch's own.
        changes: list[tuple[Any, str, Any]] = [
            (dist, "init_process_group", lambda *args, **kwargs: self.enter(0)),
            (
                parallel_state,
                "initialize_model_parallel",
                self._initialize(parallel_state.initialize_model_parallel),
            ),
            (parallel_state, "create_group", _own_groups(parallel_state.create_group)),
            (parallel_state, _RANK_GROUPS, self._remember(getattr(parallel_state, _RANK_GROUPS))),
            # A CPU build of torch has no such options.
            (parallel_state, "get_nccl_options", constant(None)),
        ]
        with ExitStack() as undo:
            for owner, name, value in changes:
                undo.callback(replace_attribute(owner, name, value))
            yield

    def _initialize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> None:
            # A gloo group in such a world crashes the process.
            self._layout = (original, args, {**kwargs, "create_gloo_process_groups": False})
            self._make_groups()

        return initialize

    def _remember(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the listing of all groups of a kind: it is the same for every stage."""

        @functools.wraps(original)
        def rank_groups(world_size: int, parallel_size: list[int], mask: list[bool]) -> Any:
            key = (world_size, tuple(parallel_size), tuple(mask))
            if key not in self._rank_groups:
                self._rank_groups[key] = original(world_size, parallel_size, mask)
            return self._rank_groups[key]

        return rank_groups

    def _make_groups(self) -> None:
        assert self._layout is not None
        original, args, kwargs = self._layout
        original(*args, **kwargs)


def _own_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's making of a group: one that this rank is not in is not made.

    All ranks of a job make all groups, which are tens of thousands in the largest jobs.
    """

    @functools.wraps(original)
    def create_group(
        ranks: Sequence[int] | None = None, group_desc: str | None = None, **_options: Any
    ) -> Any:
        if ranks is not None and dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return original(ranks=ranks, group_desc=group_desc)

    return create_group


class _OnMeta(TorchFunctionMode):
    """Puts on the meta device what names a CUDA device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = META
        if func is torch.device and is_cuda(args[0] if args else kwargs.get("type")):
            return META
        if func is torch.Tensor.to and args[0].is_meta:  # a meta tensor has nothing to move
            args = (args[0], *map(_without_device, args[1:2]), *args[2:])
            kwargs = {k: _without_device(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _without_device(value: Any) -> Any:
    """Return the meta device for any device, and another argument of `Tensor.to` as it is."""
    is_device = isinstance(value, str | torch.device) or type(value) is int  # and no bool
    return META if is_device else value


def _known_only(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that keywords are left out which it does not have."""
    known = inspect.signature(original).parameters

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{name: v for name, v in kwargs.items() if name in known})

    return __init__


@contextmanager
def building() -> Iterator[None]:
    """Within the block modules are built without memory, and stay on the meta device."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    changes: list[tuple[Any, str, Any]] = [
        (torch.nn.Module, "cuda", lambda self, *args, **kwargs: self),
        (torch.nn.Module, "to_empty", lambda self, **kwargs: self),
        # The job's machines may have the extension where this one has not.
        (layers, "_grad_accum_fusion_available", True),
        # Without Transformer Engine latent attention has no attention that takes its sizes.
        (DotProductAttention, "__init__", _known_only(DotProductAttention.__init__)),
    ]
    nvfp4: Any = sys.modules.get("transformer_engine.pytorch.tensor.nvfp4_tensor")
    if nvfp4 is not None:
        # It computes a small matrix, which it keeps for all its quantizers: with values.
        nvfp4.NVFP4Quantizer()
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(replace_attribute(owner, name, value))
        stack.enter_context(META)
        stack.enter_context(_OnMeta())
        yield


@contextmanager
def gpu_of(capability: tuple[int, int]) -> Iterator[None]:
    """Within the block CUDA is claimed, with GPUs of a compute capability."""
    was_installed = cpu.is_installed()
    if not cpu.install(claim_cuda=True, capability=capability):
        raise UsageError("a GPU is visible that cannot be hidden: set CUDA_VISIBLE_DEVICES=''")
    properties = torch.cuda.get_device_properties(0)
    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_capability", constant(capability)),
        (properties, "major", capability[0]),
        (properties, "minor", capability[1]),
    ]
    with ExitStack() as undo:
        if not was_installed:
            undo.callback(cpu.uninstall)
        for owner, name, value in changes:
            undo.callback(replace_attribute(owner, name, value))
        yield
