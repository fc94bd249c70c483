"""Megatron's settings that a run without a GPU needs, as defaults of its argument parser.

`--cpu` alone then runs a script that was written for GPUs: gloo instead of NCCL, Megatron's own
layers instead of Transformer Engine's, and no fused CUDA kernel. A flag on the command line wins.
"""

from __future__ import annotations

import argparse

CPU_DEFAULTS = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "no_persist_layer_norm": True,
    "persist_layer_norm": False,
}
"""By namespace attribute; those that a release does not have are left out."""


def set_cpu_defaults(parser: argparse.ArgumentParser) -> None:
    """Set the defaults that `parser` knows."""
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{k: v for k, v in CPU_DEFAULTS.items() if k in known})
