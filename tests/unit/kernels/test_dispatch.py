"""Which path runs, and why."""

import logging
import subprocess
import sys

import pytest
import torch

from megatron_snip.errors import UnsupportedError
from megatron_snip.kernels import dispatch
from megatron_snip.kernels.dispatch import Path, choose, forced
from megatron_snip.log import forget_warnings

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that a GPU of some compute capability, and Triton, are there."""

    def pretend(capability=(9, 0), triton=True):
        monkeypatch.setattr(dispatch, "_capability", lambda device: capability)
        monkeypatch.setattr(dispatch, "triton_found", lambda: triton)

    forget_warnings()
    return pretend


def test_the_cpu_takes_the_reference():
    choice = choose(CPU, (1, 128))
    assert choice.path is Path.REFERENCE and "cpu" in choice.reason
    assert str(choice).startswith("reference (")


def test_a_gpu_takes_the_kernels(gpu):
    gpu()
    for payload in (False, True):
        assert choose(CUDA, (1, 128), payload=payload).path is Path.TRITON


@pytest.mark.parametrize(
    ("capability", "triton", "block", "payload", "reason"),
    [
        ((9, 0), False, (1, 128), False, "not installed"),
        ((7, 5), True, (1, 128), False, "8.0"),
        ((8, 0), True, (1, 128), True, "8.9"),
        ((9, 0), True, (1, 96), False, "powers of two"),
        ((9, 0), True, (256, 256), False, "16384"),
    ],
)
def test_obstacles_are_warned_about_once(gpu, caplog, capability, triton, block, payload, reason):
    gpu(capability, triton)
    with caplog.at_level(logging.WARNING):
        choices = [choose(CUDA, block, payload=payload) for _ in range(3)]
    assert all(choice.path is Path.REFERENCE and reason in choice.reason for choice in choices)
    assert len(caplog.records) == 1 and reason in caplog.text


def test_a_path_can_be_forced(gpu):
    gpu()
    with forced(Path.REFERENCE):
        assert choose(CUDA, (1, 128)).path is Path.REFERENCE
        with forced(Path.TRITON):
            assert choose(CUDA, (1, 128)).path is Path.TRITON
        assert choose(CUDA, (1, 128)).path is Path.REFERENCE
    assert choose(CUDA, (1, 128)).path is Path.TRITON


def test_forcing_the_impossible_says_why(gpu):
    gpu(triton=False)
    with forced(Path.TRITON), pytest.raises(UnsupportedError, match="not installed"):
        choose(CUDA, (1, 128))


def test_explain_speaks_of_this_machine():
    choice = dispatch.explain()
    assert choice.path in Path and choice.reason


def test_everything_on_the_cpu_works_without_triton():
    script = """
import sys
sys.modules["triton"] = None  # importing it now fails
import torch
from megatron_snip.formats import FORMATS
from megatron_snip.quantizers import error_norms, quantize_dequantize, quantize_payload
x, fmt = torch.randn(4, 256), FORMATS["nvfp4"]
quantize_dequantize(x, fmt, (1, 16))
quantize_payload(x, fmt, (1, 16))
error_norms(x, ((fmt, (1, 16)),))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
