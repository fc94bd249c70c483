"""How many operations a measured linear starts on a GPU, and their bytes.

They are counted on the path of a run: the observer runs on tensors that have shapes and no numbers
(PyTorch's meta device), which stand for a GPU's. So an operation that waits for a number fails. A
view is no operation. The bytes of an operation are those of the tensors that it takes and returns;
caches are not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_snip.formats import get_format
from megatron_snip.kernels import launch
from megatron_snip.statistics import fused, observer, rank_sums, sample
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import LinearKind, Placement, Topology

GPU = torch.device("meta")
"""Stands for a GPU."""

NO_LAUNCH = re.compile(r"aten\.(empty|new_empty|empty_like|empty_strided)\b")
"""Operations that start nothing on a GPU, though they are no views."""


@dataclass
class Launches:
    """What was started on a GPU.

    Attributes:
        names: how often each operation or kernel was started.
        num_bytes: bytes of what they took and returned.
    """

    names: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0

    @property
    def total(self) -> int:
        """Number of all operations and kernels."""
        return self.names.total()

    def add(self, name: str, tensors: Sequence[Any]) -> None:
        """Count an operation that takes and returns tensors."""
        self.names[name] += 1
        self.num_bytes += sum(x.numel() * x.element_size() for x in tensors)


class _Counting(TorchDispatchMode):
    """Counts what PyTorch starts on CUDA tensors."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # an operation that consists of others: these are counted
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        tensors = {
            id(x): x
            for x in tree_leaves((args, kwargs, out))
            if isinstance(x, Tensor) and x.device == GPU
        }
        returns = [each.alias_info for each in func._schema.returns]
        is_view = bool(returns) and all(each and not each.is_write for each in returns)
        name = str(func)
        if tensors and not is_view and not NO_LAUNCH.match(name):
            self._launches.add(name, list(tensors.values()))
        return out


class _Recorder:
    """Stands for a Triton kernel: counts its launches, and runs nothing."""

    def __init__(self, name: str, launches: Launches) -> None:
        self._name = name
        self._launches = launches

    def __getitem__(self, grid: Any) -> Any:
        def launched(*args: Any, **_: Any) -> None:
            tensors = {id(x): x for x in args if isinstance(x, Tensor)}
            self._launches.add(self._name, list(tensors.values()))

        return launched


@contextmanager
def counting() -> Iterator[Launches]:
    """Within, tensors on the meta device are taken for a GPU's, and what is started is counted."""
    # Importing them imports Triton.
    from megatron_snip.kernels import observe, quantize

    kernels = (
        (quantize, "quantize_kernel"),
        (observe, "observe_kernel"),
    )
    launches = Launches()
    with ExitStack() as stack:
        for module, name in kernels:
            stack.enter_context(patch.object(module, name, _Recorder(name, launches)))
        stack.enter_context(patch.object(launch, "obstacle", lambda device, *_: ""))
        stack.enter_context(patch.object(torch.cuda, "device", lambda _: nullcontext()))
        is_cuda = property(lambda self: self.device == GPU)
        stack.enter_context(patch.object(Tensor, "is_cuda", is_cuda))
        for module in (sample, observer, rank_sums):
            stack.enter_context(
                patch.object(module, "to_device", lambda device, tensor: tensor.to(device))
            )
        stack.enter_context(_Counting(launches))
        yield launches


def of_linear(
    names: Sequence[str] = ("fp8", "fp4"),
    *,
    kind: LinearKind = "column",
    in_features: int = 4096,
    out_features: int = 4096,
    num_tokens: int = 8192,
    is_fused: bool = True,
    microbatch: int = 0,
) -> Launches:
    """Return what a microbatch of a measured linear starts.

    It is counted for the second of two linears that are alike. The first one also moves what
    linears share, such as the sampled rows.

    Args:
        names: the formats.
        kind: how the linear is sharded.
        in_features: number of its input features.
        out_features: number of its output features.
        num_tokens: number of tokens of the microbatch.
        is_fused: whether kernels measure; else PyTorch does.
        microbatch: which microbatch of the iteration; the first one measures W as well.
    """
    formats = {name: get_format(name) for name in names}
    settings = MeasureSettings(formats, 1, 0)
    places = [
        Placement(f"decoder.layers.{i}.mlp.linear_fc1", 0, kind, in_features, out_features)
        for i in range(2)
    ]
    hooks: list[Any] = []
    with ExitStack() as stack:
        launches = stack.enter_context(counting())
        stack.enter_context(
            patch.object(observer, "tap", lambda out, hook: hooks.append(hook) or out)
        )
        if not is_fused:
            stack.enter_context(patch.object(fused, "is_fused", lambda *_, **__: False))

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=GPU)

        watching = StepObserver(settings, Topology())
        x, w = new(num_tokens, in_features), new(out_features, in_features)
        for place in places * (1 + microbatch):
            output = new(num_tokens, out_features).requires_grad_()
            launches.names.clear()
            launches.num_bytes = 0
            watching.observe(place, x, w, output)
            hooks.pop()(new(num_tokens, out_features))
        assert watching.failure is None, watching.failure
    return launches


LAYER = {"qkv": (4096, 12288), "proj": (4096, 4096), "fc1": (4096, 22016), "fc2": (11008, 4096)}
"""[in_features, out_features] of the linears of a layer of Llama-7B."""


def table() -> list[dict[str, Any]]:
    """Return launches and bytes of a layer of Llama-7B.

    Of 8,192 tokens, in fp8 and fp4; a linear by kernels, and as PyTorch measures it.
    """
    rows = []
    for is_fused, by in ((True, "kernels"), (False, "PyTorch")):
        found = [
            of_linear(in_features=k, out_features=n, is_fused=is_fused) for k, n in LAYER.values()
        ]
        row = {"launches": sum(each.total for each in found)}
        rows.append({"name": f"a layer, by {by}", **row, "bytes": sum(f.num_bytes for f in found)})
    return rows
