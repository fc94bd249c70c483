"""Refreshes and memory: what does not fit is tried with a quarter, and nothing is held between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_snip.linears.layout import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.seam import PlannedLinear
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


@contextmanager
def one_rank(model: dict[str, Any]) -> Iterator[Trainer]:
    """A trainer in this process."""
    installed = cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with layout(model) as made:
            yield made
    finally:
        dist.destroy_process_group()
        if installed:
            cpu.uninstall()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """One rank."""
    with one_rank(MODEL) as made:
        yield made


def test_what_does_not_fit_is_tried_once_with_a_quarter(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, calls, held = recorder.fprop_error, [], []

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
        patch.setattr(recorder, "fprop_error", short_of_memory)
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


@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_memory_serves_as_well_as_memory_of_its_own(
    bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit the same statistics and training; two probes fill the buffers twice."""
    results = []
    for own in (False, True):
        if own:
            monkeypatch.setattr(PlannedLinear, "spare", None)
        with one_rank({**MODEL, "bf16": bf16}) as trainer:
            controller = trainer.controller({**SNIP, "probes": 2})
            trainer.advance(3, controller)
            tables = [r.statistics.to_json() for r in trainer.reporter.refreshes]
            controller.close()
            chunks = list(trainer.state.runner.model)
            planned = PlannedModel(chunks, current_topology(), 0).weights().values()
            assert [w.spare is not None for w in planned] == [not own] * 4
            weights = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
        results.append((tables, weights))
    (tables, weights), (own_tables, own_weights) = results
    assert len(tables) == 3
    assert tables == own_tables
    assert all(torch.equal(a, b) for a, b in zip(weights, own_weights, strict=True))


def test_a_penalty_on_weights_in_the_loss_stays_out_of_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gradient comes past the linears, while the original weights lie in gradients' memory."""
    restored: list[bool] = []
    with one_rank({**MODEL, "bf16": True}) as trainer:
        runner = trainer.state.runner
        schedule, names = runner.function, runner.model[0].named_parameters()
        (penalized,) = (p for name, p in names if name.endswith("linear_fc1.weight"))

        def with_penalty(**kwargs: Any) -> Any:
            forward_step = kwargs["forward_step_func"]

            def step(*args: Any) -> Any:
                output, loss_of = forward_step(*args)

                def loss(result: Any) -> Any:
                    total, tokens, report = loss_of(result)
                    return total + tokens * 0.1 * penalized.float().square().sum(), tokens, report

                return output, loss

            return schedule(**{**kwargs, "forward_step_func": step})

        monkeypatch.setattr(type(runner), "function", property(lambda _: with_penalty))
        controller = trainer.controller(SNIP)
        restore, perturb = refresh.restore, refresh.perturb
        before: dict[int, torch.Tensor] = {}

        def remember(probed: Any, *args: Any) -> Any:
            before[id(probed.weight)] = probed.weight.detach().clone()
            return perturb(probed, *args)

        def compare(probed: Any) -> None:
            restore(probed)
            restored.append(torch.equal(probed.weight, before[id(probed.weight)]))

        monkeypatch.setattr(refresh, "perturb", remember)
        monkeypatch.setattr(refresh, "restore", compare)
        trainer.advance(2, controller)
        assert len(trainer.reporter.refreshes) == 2
        controller.close()
    assert restored == [True] * 8
