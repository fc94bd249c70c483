"""Linear, LayerNormLinear, GroupedLinear: recipes, quantizers, cached weights, GEMMs."""

import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformer_engine.common.recipe import CustomRecipe, MXFP8BlockScaling, Recipe
from transformer_engine.pytorch.gemms import Call, LinearFunction
from transformer_engine.pytorch.norms import normalized
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, QuantizerRole
from transformer_engine.pytorch.quantizers import BY_NAME, IdentityQuantizer, Quantized, Quantizer

_FORWARD = ("input", "weight", None)
_BACKWARD = ("grad_output", None)
"""Tensor types by slot; outputs and input gradients have no role."""


class TransformerEngineBaseModule(torch.nn.Module):
    """What all linears share."""

    module_type = "linear"

    def __init__(
        self,
        name: str | None,
        in_features: int,
        out_features: int,
        tp_group: Any,
        tp_size: int,
        parallel_mode: str | None,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        bias: bool,
        return_bias: bool,
    ) -> None:
        """Take this rank's part of the features."""
        super().__init__()
        self.name = name or "Layer_1"
        self.fp8 = False
        self.fp8_initialized = False
        self.fp8_meta_tensors_initialized = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.quantizers: dict[str, list[Quantizer]] = {"scaling_fwd": [], "scaling_bwd": []}
        self._fp8_workspaces: dict[str, Quantized] = {}
        self.num_builds = 0
        """How often quantizers were built (not in Transformer Engine)."""
        self.seen: list[tuple[str, str, str]] = []
        """fprop, dgrad and wgrad recipes of every forward (not in Transformer Engine)."""
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        assert (out_features if parallel_mode == "column" else in_features) % tp_size == 0
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = False

    def _add_weight(self, index: int | str, dtype: torch.dtype | None, init_method: Any) -> None:
        """Make the parameters of a GEMM, `weight` and `bias` with its index behind."""
        dtype = dtype or torch.get_default_dtype()
        weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype))
        if init_method is not None:
            init_method(weight)
        self.register_parameter(f"weight{index}", weight)
        if self.use_bias:
            zeros = torch.zeros(self.out_features, dtype=dtype)
            self.register_parameter(f"bias{index}", torch.nn.Parameter(zeros))

    def get_extra_state(self) -> torch.Tensor:
        """A pickled custom recipe; empty for the others here, which have no state."""
        recipe = self.fp8_meta.get("recipe")
        if not (self.fp8_meta["fp8_checkpoint"] and isinstance(recipe, CustomRecipe)):
            return torch.empty(0, dtype=torch.uint8)
        state = {"recipe": recipe, "extra_fp8_variables": {"fp8_checkpoint": True}}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Custom recipes are not read back."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Follow the autocast: rebuild quantizers where Transformer Engine would."""
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        self.fp8_meta["fp8_checkpoint"] = self.fp8
        if not self.fp8:
            self.fp8_initialized = False
            return
        before: Recipe | None = self.fp8_meta.get("recipe")
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        if self.fp8_initialized and recipe == before:
            return
        self.fp8_meta["recipe"] = recipe
        if not (self.fp8_meta_tensors_initialized and _same_state(self.fp8_meta, recipe)):
            self._build(recipe, num_gemms)
        self.fp8_meta_tensors_initialized = True
        self.fp8_initialized = True
        if before is not None and not isinstance(recipe, type(before)):
            warnings.warn(f"Recipe type changed from {type(before).__name__}", stacklevel=2)
            self._fp8_workspaces.clear()

    def _build(self, recipe: Recipe, num_gemms: int) -> None:
        self.num_builds += 1
        self.fp8_meta["state"] = recipe
        for key, types in (("scaling_fwd", _FORWARD), ("scaling_bwd", _BACKWARD)):
            roles = [t and QuantizerRole(self.module_type, t, self.name) for t in types]
            self.quantizers[key] = [_made(recipe, role) for role in roles * num_gemms]

    def gemms(
        self,
        x: torch.Tensor,
        weight: torch.nn.Parameter,
        index: int,
        first: bool | None,
        communicates: bool = True,
    ) -> torch.Tensor:
        """Run one linear's GEMMs under the quantizers of GEMM `index`."""
        q_in = q_weight = q_grad = IdentityQuantizer()
        if self.fp8:
            _check_dims(self.fp8_meta["recipe"], x, weight)
            forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
            q_in, q_weight, q_grad = forward[3 * index], forward[3 * index + 1], backward[2 * index]
        key = "weight" if self.module_type == "linear" else f"weight{index}"
        quantized = self._weight(weight, q_weight, key, first)
        self.seen.append(
            (quantized.quantizer.row_recipe, quantized.quantizer.column_recipe, q_in.column_recipe)
        )
        call = Call(
            weight=quantized,
            input_quantizer=q_in,
            grad_quantizer=q_grad,
            tp_group=self.tp_group if communicates else None,
            parallel_mode=self.parallel_mode if communicates else None,
            sequence_parallel=self.sequence_parallel and communicates,
        )
        return LinearFunction.apply(x, weight, call)

    def _weight(
        self, weight: torch.Tensor, quantizer: Quantizer, key: str, first: bool | None
    ) -> Quantized:
        if not self.fp8 or first is None:
            return quantizer.quantize(weight.detach())
        cached = self._fp8_workspaces.get(key)
        if cached is None:
            cached = self._fp8_workspaces[key] = quantizer.quantize(weight.detach())
        elif first:
            cached.quantize_(weight.detach())
        return cached


def _same_state(meta: dict[str, Any], recipe: Recipe) -> bool:
    state = meta.get("state")
    return state is recipe if isinstance(recipe, CustomRecipe) else type(state) is type(recipe)


def _made(recipe: Recipe, role: QuantizerRole | None) -> Quantizer:
    if isinstance(recipe, CustomRecipe):
        return recipe.qfactory(role)
    return BY_NAME[recipe.label]()


def _check_dims(recipe: Recipe, *tensors: torch.Tensor) -> None:
    rows, columns = (32, 32) if isinstance(recipe, MXFP8BlockScaling) else (8, 16)
    for tensor in tensors:
        leading = math.prod(tensor.shape[:-1])
        if leading % rows or tensor.shape[-1] % columns:
            raise ValueError(f"low-precision GEMMs cannot take {list(tensor.shape)}")


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        name: str | None = None,
        **unused: Any,
    ) -> None:
        tp_size = tp_size if tp_group is None else tp_group.size()
        sizes = (in_features, out_features, tp_group, tp_size, parallel_mode, sequence_parallel)
        super().__init__(name, *sizes, fuse_wgrad_accumulation, bias, return_bias)
        self._add_weight("", params_dtype, init_method)
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = 1 if parallel_mode == "row" else 0
        self.weight.partition_stride = 1

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        self.init_fp8_metadata(1)
        out = self.gemms(inp, self.weight, 0, is_first_microbatch)
        if self.use_bias and not self.return_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(in_features, out_features, **others)
        assert not return_layernorm_output
        del self.save_original_input
        self.eps, self.normalization = eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        dtype = self.weight.dtype
        self.layer_norm_weight = torch.nn.Parameter(start(in_features, dtype=dtype))
        self.layer_norm_bias = None
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        if normalization != "RMSNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        gain, bias = self.layer_norm_weight, self.layer_norm_bias
        x = normalized(inp, self.normalization, gain, bias, self.eps, self.zero_centered_gamma)
        return super().forward(x, is_first_microbatch)


class GroupedLinear(TransformerEngineBaseModule):
    module_type = "grouped_linear"

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        name: str | None = None,
        **unused: Any,
    ) -> None:
        sizes = (in_features, out_features, tp_group, tp_size, parallel_mode, sequence_parallel)
        super().__init__(name, *sizes, fuse_wgrad_accumulation, bias, return_bias)
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self._add_weight(i, params_dtype, init_method)

    def forward(
        self, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None
    ) -> Any:
        sizes = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        assert len(sizes) == self.num_gemms
        self.init_fp8_metadata(self.num_gemms)
        pieces = torch.split(inp, sizes)
        outs = [
            self.gemms(piece, getattr(self, f"weight{i}"), i, is_first_microbatch, False)
            for i, piece in enumerate(pieces)
        ]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms) if self.use_bias]
        if biases and not self.return_bias:
            outs = [out + bias for out, bias in zip(outs, biases, strict=True)]
        out = torch.cat(outs)
        return (out, biases) if self.return_bias else out
