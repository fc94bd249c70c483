"""A layer of Llama-7B's width under bf16, fp8 and bf16 again: bits, recipes, time and memory."""

import time
from collections.abc import Callable

import pytest
import torch

from megatron_snip.linears.runtime import MicrobatchTokens
from tests import models

ON_GPU = models.DEVICE == "cuda"
WIDE = {"hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32}


@pytest.mark.real_te
def test_a_switch_to_fp8_and_back_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setattr(models, "SEQUENCE", 2048 if ON_GPU else 16)
    changes = {**(WIDE if ON_GPU else {}), "num_layers": 1}
    model = models.build(params_dtype=torch.bfloat16, bf16=True, **changes).bfloat16()
    tokens = models.SEQUENCE * models.BATCH
    under = models.planned(model, tokens=MicrobatchTokens(tokens))
    found, held = {}, {}
    for label in ("bf16", "fp8", "bf16 again"):
        under.apply(models.assignment(under, label.split()[0]))
        for _ in range(5):
            model.zero_grad()
            begin = time.perf_counter()
            found[label] = models.losses(model)  # which waits for the GPU
            seconds = time.perf_counter() - begin
        if ON_GPU:
            held[label] = torch.cuda.memory_allocated()
            record_property(f"{label}, seconds", seconds)
            record_property(f"{label}, peak bytes", torch.cuda.max_memory_allocated())
            record_property(f"{label}, held bytes", held[label])
            torch.cuda.reset_peak_memory_stats()
        assert {linear.recipe for linear in under.linears} != {"simulated"}
    under.uninstall()
    assert found["bf16"] == found["bf16 again"] != found["fp8"]
    assert not ON_GPU or held["bf16 again"] <= 1.01 * held["bf16"]
