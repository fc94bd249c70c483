"""Enums of the extension, with the values of the C++ ones, and classes that are only named here.

Sources: common/util/pybind_helper.h (NVTE_DECLARE_COMMON_PYBIND11_HANDLES), pybind.cpp.
"""

from enum import Enum, IntEnum

import torch


class _Named(IntEnum):
    """An enum of pybind11: `str` gives its name."""

    __str__ = Enum.__str__


def _enum(name: str, words: str) -> type[_Named]:
    return _Named(name, [(word, i) for i, word in enumerate(words.split())], module=__name__)


class DType(IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_dtype(code: int) -> torch.dtype:
    """Return the dtype of an enum's value, Transformer Engine's own enum or ours."""
    return TORCH_DTYPES[DType(int(code))]


NVTE_Bias_Type = _enum(
    "NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI"
)
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _enum(
    "NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX"
)
NVTE_QKV_Format = _enum(
    "NVTE_QKV_Format",
    "NVTE_BSHD NVTE_SBHD NVTE_THD NVTE_SBHD_2BSHD NVTE_BSHD_2SBHD NVTE_THD_2BSHD NVTE_THD_2SBHD "
    "NVTE_BHSD NVTE_QKV_Format_NOT_SET",
)
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout",
    "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD "
    "NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D "
    "NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD "
    "NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD NVTE_Paged_KV_BSHD_BSHD_BSHD "
    "NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD NVTE_Paged_KV_SBHD_SBHD_SBHD "
    "NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD "
    "NVTE_QKV_Layout_NOT_SET",
)
_ATTENTION_BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
NVTE_Fused_Attn_Backend = IntEnum("NVTE_Fused_Attn_Backend", _ATTENTION_BACKENDS)
EARLIER_FUSED_ATTN_BACKEND = IntEnum(
    "NVTE_Fused_Attn_Backend", {**_ATTENTION_BACKENDS, "NVTE_F16_max512_seqlen": 0}
)
"""What 2.14 and 2.8 have; 2.20 compares the members with its own."""
NVTEScalingMode = _enum(
    "NVTEScalingMode",
    "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
    "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
)
Float8BlockScaleTensorFormat = _enum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
CommOverlapType = _enum("CommOverlapType", "RS AG")
CommOverlapAlgo = _enum(
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
    "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P "
    "EXTERNAL_BULK_OVERLAP_AG",
)
NVTERoutingMapFormat = _enum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
NVTEQBHistogramMode = _enum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")
FP8FwdTensors = _enum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _enum(
    "FP8BwdTensors",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
)


class FP8TensorMeta:
    scale = None
    scale_inv = None
    amax_history = None


class CommOverlapCore: ...


class CommOverlapBase(CommOverlapCore): ...


class CommOverlapP2PBase(CommOverlapCore): ...


class CommOverlap(CommOverlapBase): ...


class CommOverlapP2P(CommOverlapP2PBase): ...


class CommOverlapHelper: ...
