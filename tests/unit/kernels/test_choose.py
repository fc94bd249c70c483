"""When the kernels run, and the reason that logs show."""

import logging
from pathlib import Path

import pytest
import torch

from megatron_snip.kernels import launch
from megatron_snip.kernels.launch import obstacle, use_kernels
from megatron_snip.log import forget_warnings
from tests.processes import ROOT, run_python

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that a GPU of some compute capability, and Triton, are there."""

    def pretend(capability=(9, 0), triton=True):
        monkeypatch.setattr(launch, "compute_capability", lambda device: capability)
        monkeypatch.setattr(launch, "triton_found", lambda: triton)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    forget_warnings()
    return pretend


def test_a_gpu_takes_the_kernels_and_the_cpu_the_reference(gpu):
    gpu()
    assert use_kernels(CUDA, (1, 128), (128, 1))
    assert not use_kernels(CPU, (1, 128)) and "cpu" in obstacle(CPU, (1, 128))


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
        assert not any(use_kernels(CUDA, (1, 128), block) for _ in range(3))
    assert len(caplog.records) == 1 and reason in caplog.text


def test_everything_on_the_cpu_works_without_triton():
    script = """
import sys
sys.modules["triton"] = None  # importing it now fails
import torch
from megatron_snip.formats import FORMATS
from megatron_snip.quantizers.quantize import quantize_dequantize
x, fmt = torch.randn(4, 256), FORMATS["nvfp4"]
quantize_dequantize(x, fmt, (1, 16))
"""
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [pytest.param("test_bits.py", marks=pytest.mark.slow), "test_observe.py"],
)
def test_kernels_agree_with_pytorch_in_the_interpreter(name):
    pytest.importorskip("triton")
    tests = Path(__file__).with_name(name)
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
    done = run_python(*words, cwd=ROOT, timeout=1200, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
