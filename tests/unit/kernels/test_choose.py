"""When the kernels run, and the reason that logs show."""

import logging
import subprocess
import sys

import pytest
import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import FORMATS
from megatron_snip.kernels import launch
from megatron_snip.kernels.launch import Path, choose, forced
from megatron_snip.log import forget_warnings
from megatron_snip.quantizers import quantize_dequantize

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that a GPU of some compute capability, and Triton, are there."""

    def pretend(capability=(9, 0), triton=True):
        monkeypatch.setattr(launch, "_capability", lambda device: capability)
        monkeypatch.setattr(launch, "triton_found", lambda: triton)

    forget_warnings()
    return pretend


def test_a_gpu_takes_the_kernels_and_the_cpu_the_reference(gpu):
    gpu()
    assert choose(CUDA, (1, 128), (128, 1)).path is Path.TRITON
    choice = choose(CPU, (1, 128))
    assert choice.path is Path.REFERENCE and "cpu" in choice.reason


@pytest.mark.parametrize(
    ("capability", "triton", "block", "reason"),
    [
        ((9, 0), False, (1, 128), "not installed"),
        ((7, 5), True, (1, 128), "8.0"),
        ((9, 0), True, (1, 96), "powers of two"),
        ((9, 0), True, (256, 256), "16384"),
    ],
)
def test_obstacles_are_warned_about_once(gpu, caplog, capability, triton, block, reason):
    gpu(capability, triton)
    with caplog.at_level(logging.WARNING):
        choices = [choose(CUDA, (1, 128), block) for _ in range(3)]
    assert all(choice.path is Path.REFERENCE and reason in choice.reason for choice in choices)
    assert len(caplog.records) == 1 and reason in caplog.text


def test_a_path_can_be_forced(gpu):
    gpu()
    with forced(Path.REFERENCE):
        assert choose(CUDA, (1, 128)).path is Path.REFERENCE
        with forced(Path.TRITON):
            assert choose(CUDA, (1, 128)).path is Path.TRITON
        assert choose(CUDA, (1, 128)).path is Path.REFERENCE
    gpu(triton=False)
    with forced(Path.TRITON), pytest.raises(UnsupportedError, match="not installed"):
        quantize_dequantize(torch.ones(2, 2), FORMATS["fp4"], (1, 2))


def test_everything_on_the_cpu_works_without_triton():
    script = """
import sys
sys.modules["triton"] = None  # importing it now fails
import torch
from megatron_snip.formats import FORMATS
from megatron_snip.quantizers import error_norms, quantize_dequantize
x, fmt = torch.randn(4, 256), FORMATS["nvfp4"]
quantize_dequantize(x, fmt, (1, 16))
error_norms(x, ((fmt, (1, 16)),))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
