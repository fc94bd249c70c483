"""Flags that say which layers each pipeline stage holds, where a plan or problem does not."""

import argparse
import bisect
import itertools
from collections.abc import Mapping, Sequence

from megatron_snip.cli.common import integer
from megatron_snip.errors import UsageError
from megatron_snip.planning.stage_layers import StageLayers, outer_layer


def add_stage_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `stage_layers_from` reads."""
    group = parser.add_argument_group("pipeline")
    text = "pipeline-parallel size [that of the plan or problem]"
    group.add_argument("--pipeline-stages", metavar="P", type=integer, help=text)
    text = (
        "decoder layers of each model chunk, in forward order; m marks the chunk with multi-token "
        "prediction, as in 2,2,0m,0 [that of the plan or problem; m: the last chunk]"
    )
    group.add_argument("--chunk-layers", metavar="N,N,...", type=_chunks, help=text)


def stage_layers_from(
    args: argparse.Namespace, names: Sequence[str], known: StageLayers | None, num_stages: int
) -> StageLayers:
    """Return the layers of each pipeline stage: those of the flags, else those that are known.

    Args:
        args: The parsed flags.
        names: The linears.
        known: The layers of each stage of the job that the plan or problem is of, or None.
        num_stages: The number of stages of that job.

    Raises:
        UsageError: if the layers are not known, or do not add up.
    """
    chunks = args.chunk_layers
    wanted = args.pipeline_stages
    if known is not None:
        num_stages = known.num_stages
        if chunks is None and wanted in (None, num_stages):
            return known
    if wanted is None and chunks is not None and len(chunks) != num_stages:
        raise UsageError(
            f"--chunk-layers gives {len(chunks)} model chunks, and the number of pipeline stages "
            f"known is {num_stages}; give --pipeline-stages"
        )
    num_stages = wanted or max(num_stages, 1)
    layers: dict[str, tuple[str, int]] = {}
    for name in names:
        layer, block, _ = outer_layer(name)
        layers[layer] = (block, int(layer.rpartition(".")[2]))
    decoder = [number for block, number in layers.values() if block == "decoder"]
    num_decoder = 1 + max(decoder, default=-1)
    if chunks is None:
        if num_stages > 1:
            raise UsageError(
                f"which layers each of the {num_stages} pipeline stages holds is not known; give "
                f"the number of layers of each model chunk (together {num_decoder}): "
                "--chunk-layers N,N,..."
            )
        chunks = ((num_decoder, True),)
    return _counted_layers(layers, num_decoder, num_stages, chunks)


def _counted_layers(
    layers: Mapping[str, tuple[str, int]],
    num_decoder: int,
    num_stages: int,
    chunks: Sequence[tuple[int, bool]],
) -> StageLayers:
    """Return the layers of each stage, from the number of layers of each model chunk.

    Args:
        layers: (block, number) of each layer.
        num_decoder: number of decoder layers.
        num_stages: pipeline-parallel size.
        chunks: number of decoder layers of each chunk in forward order, and whether the layers of
            multi-token prediction are there; chunk 0 of every stage comes first.

    Raises:
        UsageError: if the layers do not add up, or where a layer is cannot be known.
    """
    if len(chunks) % num_stages:
        raise UsageError(
            f"{len(chunks)} model chunks for {num_stages} pipeline stages; give the same number of "
            "chunks for every stage"
        )
    given = sum(count for count, _ in chunks)
    if given != num_decoder:
        raise UsageError(
            f"--chunk-layers gives {given} layers in {len(chunks)} chunks; the model has "
            f"{num_decoder}"
        )
    with_mtp = [index for index, (_, has_mtp) in enumerate(chunks) if has_mtp]
    if len(with_mtp) > 1:
        raise UsageError("--chunk-layers: all layers of multi-token prediction are in one chunk")
    tables: list[dict[str, int]] = [{} for _ in chunks]
    ends = list(itertools.accumulate(count for count, _ in chunks))
    for layer, (block, number) in layers.items():
        if block == "decoder":
            index = bisect.bisect_right(ends, number)
            tables[index][layer] = number - (ends[index] - chunks[index][0])
        elif block == "mtp" or len(chunks) == 1:
            tables[with_mtp[0] if with_mtp else -1][layer] = number
        else:
            raise UsageError(
                f"'{layer}': --chunk-layers counts layers of the decoder; export the plan of a run "
                "with these pipeline stages, or give --pipeline-stages 1"
            )
    return StageLayers(tuple(tuple(tables[stage::num_stages]) for stage in range(num_stages)))


def _chunks(text: str) -> tuple[tuple[int, bool], ...]:
    """Return (number of decoder layers, whether multi-token prediction is there) of each chunk."""
    parts = text.split(",")
    return tuple((integer(part.removesuffix("m"), least=0), part.endswith("m")) for part in parts)
