"""Predicted step time from published GEMM rates.

    time = other FLOPs / rate(bf16) + linear FLOPs * sum over formats of share / rate(format)

for a reference model; `share` is the run's. Rates are the makers' dense peaks, so this is
what the arithmetic allows: quantizing, memory and communication come on top. A device without
tensor cores for a format runs it at the rate of the next wider format that it has, and the stress
format, which no device has, counts as FP4.

Sources (dense, that is half of what is printed for 2:4 sparsity): NVIDIA H100 Tensor Core GPU
datasheet, SXM: BF16 989, FP8 1979 TFLOPS; NVIDIA HGX B200 datasheet, for one of eight GPUs: BF16
2250, FP8 4500, FP4 9000 TFLOPS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_snip.formats import get_format
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.config import linear_shapes

TERA = 1e12


@dataclass(frozen=True)
class Device:
    """A GPU's dense matrix rates.

    Attributes:
        name: short.
        rates: FLOPs a second, by bits of an element.
    """

    name: str
    rates: Mapping[int, float]

    def rate(self, format_name: str) -> float:
        """Return the rate of a format; see the file's text for formats that the device lacks."""
        bits = get_format(format_name).bits
        return self.rates[min(b for b in self.rates if b >= bits)]


HOPPER = Device("Hopper", {16: 989 * TERA, 8: 1979 * TERA})
BLACKWELL = Device("Blackwell", {16: 2250 * TERA, 8: 4500 * TERA, 4: 9000 * TERA})
DEVICES = (HOPPER, BLACKWELL)

REFERENCE = make_train_config(
    {
        "num_layers": 80,
        "hidden_size": 8192,
        "ffn_hidden_size": 28672,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "seq_length": 4096,
        "vocab_size": 32000,
    }
)
"""The model that step times are predicted for: Llama's 70B shape."""


def relative_step_time(
    shares: Mapping[str, float], device: Device, model: TrainConfig = REFERENCE
) -> float:
    """Return the predicted time of a step over that of the same step in BF16, in (0, 1].

    Args:
        shares: share of linear FLOPs by format; they add up to 1.
        device: whose rates count.
        model: whose FLOPs count.
    """
    linear = sum(shape.flops_per_token for shape in linear_shapes(model))
    other = other_flops_per_token(model)
    bf16 = device.rate("bf16")
    spent = sum(share * linear / device.rate(name) for name, share in shares.items())
    return (other / bf16 + spent) / ((other + linear) / bf16)


def other_flops_per_token(model: TrainConfig) -> float:
    """Return the FLOPs of the GEMMs that stay in BF16: causal attention and the output layer.

    Forward and backward together are three times the forward pass. A token attends to half of the
    sequence on average, in two GEMMs (scores, values) of 2 s/2 h FLOPs each.
    """
    width = model.num_attention_heads * model.head_width
    attention = 3 * model.num_layers * 2 * (2 * model.seq_length / 2 * width)
    return attention + 3 * 2 * model.hidden_size * model.padded_vocab_size
