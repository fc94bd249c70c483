"""Finds Transformer Engine's Python and gives it the extension of this folder.

A few things in it want a GPU and are not in the extension; they are replaced when imported.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from megatron_snip.patches import cpu
from tests.te_on_cpu.context_parallel import replace_attention

RELEASES = ("2.20.2", "2.14.0", "2.8.0")
"""Releases that `make install` unpacks: the newest, one between, and the oldest that can run."""

EXTENSION = "transformer_engine_torch"


def install(capability: tuple[int, int] = (10, 0), release: str = RELEASES[0]) -> None:
    """Make `import transformer_engine` work in this process, without a GPU; idempotent.

    Args:
        capability: compute capability of the GPU that is claimed.
        release: of Transformer Engine.

    Raises:
        FileNotFoundError: if the release is not unpacked.
    """
    if EXTENSION in sys.modules:
        return
    folder = os.path.join(sys.prefix, "te", release)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"no Transformer Engine in {folder}; run `make install`")
    sys.path.insert(0, folder)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # so that no shared library is looked for
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for name, change in _CHANGES.items():
        sys.meta_path.insert(0, _Changed(name, change))
    from tests.te_on_cpu import extension

    if release != RELEASES[0]:
        _be_earlier(extension)
    sys.modules[EXTENSION] = extension
    cpu.install(claim_cuda=True, capability=capability)
    torch.version.cuda = torch.version.cuda or "13.0"  # blockwise FP8 needs 12.9
    torch.Tensor.is_cuda = property(_is_cuda)
    from tests.te_on_cpu import probe

    probe.install()


def _be_earlier(extension: ModuleType) -> None:
    """Answer as the extension did in 2.14 and 2.8."""
    newest = extension.get_fused_attn_backend
    vars(extension)["NVTE_Fused_Attn_Backend"] = extension.EARLIER_FUSED_ATTN_BACKEND
    vars(extension)["get_fused_attn_backend"] = lambda *args: newest(*args)[0]  # without a reason


def _is_cuda(_: torch.Tensor) -> bool:
    """Whether a tensor is on the GPU, for Transformer Engine: always. Megatron hears the truth."""
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return str(caller).startswith("transformer_engine")


def _load_extension(common: ModuleType) -> None:
    """The extension is loaded already; nothing is to be found on disk."""
    vars(common)["load_framework_extension"] = lambda framework: None


def _dequantize(autograd_function: str) -> Callable[[ModuleType], None]:
    """Dequantize without moving the tensor to a GPU and back."""

    def change(storage: ModuleType) -> None:
        def forward(_: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
            from transformer_engine.pytorch.constants import TE_DType

            return sys.modules[EXTENSION].dequantize(tensor, TE_DType[dtype])

        getattr(storage, autograd_function).forward = staticmethod(forward)

    return change


def _pad_scales(triton_module: ModuleType) -> None:
    """The one Triton kernel that gathering NVFP4 needs: scales padded to the tiles of cuBLAS."""

    def pad_columnwise_scale_inv(scales: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = scales.shape
        return torch.nn.functional.pad(scales, (0, -num_columns % 4, 0, -num_rows % 128))

    vars(triton_module)["pad_columnwise_scale_inv"] = pad_columnwise_scale_inv


def _keep_graph_buffers(graph: ModuleType) -> None:
    """Weak references are made from addresses in a GPU's memory; strong ones cost memory alone."""
    vars(graph)["make_weak_ref"] = lambda kept: kept


_STORAGE = "transformer_engine.pytorch.tensor.storage"
_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
_CHANGES: dict[str, Callable[[ModuleType], None] | None] = {
    "transformer_engine.common": _load_extension,
    "transformer_engine.pytorch.triton.pad": _pad_scales,
    "transformer_engine.pytorch.graph": _keep_graph_buffers,
    f"{_STORAGE}.mxfp8_tensor_storage": _dequantize("_FromMXFP8Func"),
    f"{_STORAGE}.nvfp4_tensor_storage": _dequantize("_FromNVFP4Func"),
    f"{_ATTENTION}.dot_product_attention": replace_attention,
    "transformer_engine.pytorch.onnx_extensions": None,
}
"""Module -> what is done to it when it has run; None is an empty module in its place."""


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module where it is, runs it and changes it."""

    def __init__(self, name: str, change: Callable[[ModuleType], None] | None) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        self._found = importlib.util.find_spec(name)
        assert self._found is not None
        return importlib.util.spec_from_file_location(
            name,
            self._found.origin,
            loader=self,
            submodule_search_locations=self._found.submodule_search_locations,
        )

    def exec_module(self, module: ModuleType) -> None:
        if self._change is None:  # ONNX export, whose packages are large
            vars(module)["__getattr__"] = lambda name: mock.MagicMock(name=name)
            return
        loader: Any = self._found and self._found.loader
        loader.exec_module(module)
        self._change(module)
