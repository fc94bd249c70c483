"""Which output features wgrad is measured on: all microbatches and all layouts agree."""

import pytest
import torch

from megatron_snip.quantizers.stochastic import ColumnMap, StochasticStream, StreamKey
from megatron_snip.statistics.sample import MeasureSettings, draw_sample, sampled_features
from tests.unit.statistics.equations import FORMATS, NAME


@pytest.mark.parametrize(("cols", "chunks"), [(512, 1), (768, 1), (512, 2), (516, 1), (264, 2)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_measure_the_features_of_the_complete_linear(
    cols: int, chunks: int, world_size: int
) -> None:
    """Also where a width does not divide: then every layout measures all of its features."""

    def measured(size: int) -> list[int]:
        maps = [ColumnMap.shard(cols // size, rank, size, chunks) for rank in range(size)]
        local = torch.arange(cols // size)
        streams = [StochasticStream(StreamKey(1, NAME, 7, 0), columns) for columns in maps]
        sampled = [sampled_features(stream, cols // size, 3) for stream in streams]
        parts = [m.columns(local)[s] for m, s in zip(maps, sampled, strict=True)]
        return sorted(torch.cat(parts).tolist())

    assert measured(world_size) == measured(1)
    assert len(measured(1)) == (cols // 4 if cols // chunks % 256 == 0 else cols)


def test_four_microbatches_measure_every_feature() -> None:
    settings = MeasureSettings(FORMATS, iteration=7, seed=1)
    first = [draw_sample(settings, 4096, microbatch).first_feature for microbatch in range(8)]
    assert sorted(first[:4]) == [0, 1, 2, 3] and first[4:] == first[:4]
    others = {draw_sample(MeasureSettings(FORMATS, i, 1), 4096, 0).first_feature for i in range(20)}
    assert others == {0, 1, 2, 3}
    every = MeasureSettings(FORMATS, 7, 1, all_tokens=True)
    assert draw_sample(every, 4096, 0).first_feature is None
