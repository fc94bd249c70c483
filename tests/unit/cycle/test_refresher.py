"""Refreshes and memory: what does not fit is tried with a quarter, and nothing is held between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_snip.patches import cpu
from megatron_snip.statistics import recorder, refresh
from megatron_snip.statistics.recorder import Recorder
from tests.distributed.workers.small_model import Trainer, layout

MODEL = {
    "num_layers": 1,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 1,
    "num_query_groups": 1,
    "seq_length": 32,
    "global_batch_size": 8,
}
SNIP = {
    "interval": 1,
    "start_step": 0,
    "collect_only": True,
    "stat_microbatches": 8,
    "probe_rows": 16,
}


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """One rank."""
    installed = cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with layout(MODEL) as made:
            yield made
    finally:
        dist.destroy_process_group()
        if installed:
            cpu.uninstall()


def test_what_does_not_fit_is_tried_once_with_a_quarter(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, calls, held = recorder.format_errors, [], []

    def short_of_memory(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:  # well within the first microbatch
            raise torch.OutOfMemoryError("tried to allocate 1.00 EiB")
        return measured(*args)

    class Watched(Recorder):
        def __init__(self, *args: Any) -> None:
            # When the second try begins, nothing of the first is left.
            assert [each() for each in held] == [None] * len(held)
            super().__init__(*args)
            held.append(weakref.ref(self))

    controller = trainer.controller(SNIP)
    trainer.advance(1, controller)
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "format_errors", short_of_memory)
        patch.setattr(refresh, "Recorder", Watched)
        trainer.advance(1, controller)
    controller.close()
    assert len(held) == 2
    whole, quarter = (r.statistics.linears for r in trainer.reporter.refreshes)
    for before, after in zip(whole, quarter, strict=True):
        assert (before.microbatches, after.microbatches) == (8, 2)
        assert (before.tokens, after.tokens) == (8 * 32, 2 * 32)
        assert before.probe_tokens == 16 * after.probe_tokens > 0  # a quarter of both
    (warning,) = trainer.warnings
    assert "ran out of memory" in warning and "1/4 of its microbatches" in warning


def live_bytes() -> int:
    """Bytes of all tensors that anybody holds, on whatever device."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not isinstance(thing, weakref.ProxyType):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_refreshes_leave_no_tensor_behind(trainer: Trainer) -> None:
    controller = trainer.controller({**SNIP, "stat_microbatches": 1})
    trainer.advance(2, controller)  # the optimizer's moments exist then
    before = live_bytes()
    for _ in range(3):
        trainer.advance(4, controller)
        assert live_bytes() == before
    assert len(trainer.reporter.refreshes) == 14
    controller.close()
