"""Flags that `export` and `import` share: the layers of each pipeline stage."""

from __future__ import annotations

import argparse

from megatron_snip.cli.common import integer
from megatron_snip.errors import UsageError
from megatron_snip.linears.te.precision_config import Stages


def add_stage_flags(parser: argparse.ArgumentParser) -> None:
    """Add the pipeline's layout."""
    group = parser.add_argument_group("pipeline")
    group.add_argument(
        "--pipeline-stages",
        metavar="P",
        help="pipeline-parallel size [that of the plan or problem]",
    )
    group.add_argument(
        "--chunks-per-stage",
        metavar="V",
        default="1",
        help="model chunks of a stage under interleaved pipelines [1]",
    )
    group.add_argument(
        "--chunk-layers",
        metavar="N,N,...",
        help="layers of each model chunk in the order of the data, if they are uneven",
    )


def stages_from(args: argparse.Namespace, num_layers: int, known: int) -> Stages:
    """Return the layout.

    Args:
        args: parsed flags.
        num_layers: of the decoder.
        known: stages that the plan or the problem has, which may be of another job.

    Raises:
        UsageError: if a flag is no number, or the layers do not add up.
    """
    num_stages = known
    if args.pipeline_stages is not None:
        num_stages = integer("--pipeline-stages", args.pipeline_stages)
    per_stage = integer("--chunks-per-stage", args.chunks_per_stage)
    if args.chunk_layers is None:
        return Stages.even(num_layers, num_stages, per_stage)
    texts = args.chunk_layers.split(",")
    chunks = tuple(integer("--chunk-layers", text, least=0) for text in texts)
    if len(chunks) != num_stages * per_stage or sum(chunks) != num_layers:
        raise UsageError(
            f"--chunk-layers gives {sum(chunks)} layers in {len(chunks)} chunks; the model has "
            f"{num_layers} in {num_stages * per_stage}"
        )
    return Stages(num_stages, chunks)
