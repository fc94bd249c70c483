"""What the extension answers about the machine: libraries as of CUDA 13, and no fused attention.

The GPU's compute capability is what `torch.cuda.get_device_capability` says, which tests set.
"""

from typing import Any

import torch

from tests.te_on_cpu.extension.enums import NVTE_Fused_Attn_Backend

BLACKWELL = (10, 0)


def get_cublasLt_version() -> int:
    """misc.cpp:20. Blockwise FP8 needs 12.9, NVFP4 12.8."""
    return 130500


def get_cudnn_version() -> int:
    """misc.cpp:22."""
    return 91500


def get_num_cublas_streams() -> int:
    """common/multi_stream.cpp, nvte_get_num_compute_streams."""
    return 4


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """pybind.cpp."""
    return 0, -5


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """common/gemm/cublaslt_grouped_gemm.cu; what is allocated is not used here."""
    return 1024


def get_fused_attn_backend(*_: Any, **__: Any) -> tuple[Any, str]:
    """attention.cpp. Transformer Engine then runs its unfused attention, in torch."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "no GPU"


def device_supports_multicast(device_id: int = -1) -> bool:
    """comm_gemm_overlap."""
    return False


def ubuf_built_with_mpi() -> bool:
    """comm_gemm_overlap."""
    return False


def nvte_built_with_cublasmp() -> bool:
    """comm_gemm_overlap."""
    return False


def ep_zero_copy_supported() -> bool:
    """ep.cpp."""
    return False


def has_non_tn_fp8_gemm() -> bool:
    """nvte_is_non_tn_fp8_gemm_supported: Blackwell multiplies FP8 operands in any layout.

    Elsewhere a tensor with one scale has a second buffer, its transpose.
    """
    return torch.cuda.get_device_capability() >= BLACKWELL
