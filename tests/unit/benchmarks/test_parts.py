"""Costs of parts add up to what was put in, and the bound is a bound."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import parts
from megatron_snip.errors import UsageError

TRAIN = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4}
BY_LAYER = {"0": 0.03, "1": 0.01}
BY_KIND = {"qkv": 0.02, "proj": 0.0, "fc1": 0.01, "fc2": 0.01}


def comparison(**more: float) -> dict[str, Any]:
    """fprop costs 0.04, by the shares above."""
    gaps = {"bf16": 0.0, "low-fprop": 0.04, "low-dgrad": 0.006, "low-wgrad": 0.012}
    gaps |= {f"low-fprop-but-{k}": 0.04 - v for k, v in {**BY_LAYER, **BY_KIND}.items()}
    gaps = {"fp8": 0.0, **gaps}
    gaps = {name: gap + 0.001 * (name != "bf16") for name, gap in gaps.items()}  # FP8's own
    rows = [
        {"contender": name, "seeds": 1, "gap": {"mean": gap}}
        for name, gap in {**gaps, **more}.items()
    ]
    table = {"lowest": "fp3", "target": 0.75, "rows": rows}
    return {"machine": {}, "commit": "c", "settings": {"train": TRAIN}, "tables": [table]}


def test_costs_are_what_leaving_a_part_out_saves() -> None:
    found = parts.parts_of(comparison(), None)
    assert found["fprop_by_layer"] == pytest.approx(BY_LAYER)
    assert found["fprop_by_kind"] == pytest.approx(BY_KIND)
    assert parts.shares({"a": 3.0, "b": 1.0, "c": -2.0}) == {"a": 0.75, "b": 0.25, "c": 0.0}


def test_the_least_gap_is_what_exhaustive_search_finds_or_less() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        pieces = [(float(c), float(f)) for c, f in generator.uniform(0.1, 1.0, (8, 2))]
        total = sum(flops for _, flops in pieces)
        sets = itertools.product((0, 1), repeat=8)
        best = min(
            sum(c for (c, _), on in zip(pieces, chosen, strict=True) if on)
            for chosen in sets
            if sum(f for (_, f), on in zip(pieces, chosen, strict=True) if on) >= 0.75 * total
        )
        bound = parts.least_gap(pieces, 0.75)
        assert 0.6 * best < bound <= best + 1e-12
    assert parts.least_gap([(1.0, 1.0), (0.2, 1.0)], 0.75) == pytest.approx(0.2 + 0.5)
    assert parts.least_gap([(1.0, 1.0), (0.2, 3.0)], 1.0) == pytest.approx(1.2)
    assert parts.least_gap([(-1.0, 1.0), (-1.0, 1.0), (1.0, 2.0)], 0.25) == pytest.approx(-2.0)


def test_what_is_left_is_by_gemm_and_by_linear_and_holds_fp8_once() -> None:
    given = comparison()
    found = parts.parts_of(given, None)
    assert found["costs"] == pytest.approx({"fprop": 0.04, "dgrad": 0.006, "wgrad": 0.012})
    # qkv 192 x 64, proj 64 x 64, fc1 128 x 64, fc2 64 x 64: shares of FLOPs 3, 1, 2, 1 of 7
    flops = {"qkv": 3 / 14, "proj": 1 / 14, "fc1": 2 / 14, "fc2": 1 / 14}
    share = {"qkv": 0.5, "proj": 0.0, "fc1": 0.25, "fc2": 0.25}
    pieces = [
        (0.04 * layer * share[kind], 0.006 * flops[kind], 0.012 * flops[kind], flops[kind])
        for layer in (0.75, 0.25)
        for kind in flops
    ]
    by_linear = parts.least_gap([(f + d + w, size) for f, d, w, size in pieces], 0.75)
    by_gemm = parts.least_gap([(c, p[3] / 3) for p in pieces for c in p[:3]], 0.75)
    assert found["least_gap_by_linear"] == pytest.approx(0.001 + by_linear)
    assert found["least_gap_by_gemm"] == pytest.approx(0.001 + by_gemm)
    assert 0.0 < by_gemm < by_linear < 0.75 * 0.058
    given["tables"][0]["target"] = 0.5
    assert parts.parts_of(given, None)["least_gap_by_linear"] < found["least_gap_by_linear"]


def test_predictions_stand_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj")
    rows = [
        {
            "name": f"decoder.layers.{layer}.{module}",
            "options": {"fp3": {"loss_divergence": 1.0 + 2.0 * layer}},
        }
        for layer in range(2)
        for module in modules
    ]
    layers, kinds = parts.predicted_shares({"linears": rows}, "fp3")
    assert layers == {"0": 0.25, "1": 0.75} and kinds == {"qkv": 0.5, "proj": 0.5}

    file, output = tmp_path / "c.json", tmp_path / "out.json"
    file.write_text(json.dumps(comparison()))
    assert parts.main([str(file), "--output", str(output)]) == 0
    assert "fprop of layer 0" in capsys.readouterr().out
    assert json.loads(output.read_text())["fprop_by_layer"] == pytest.approx(BY_LAYER)


def test_costs_of_nothing_cannot_be_shared() -> None:
    with pytest.raises(UsageError, match="none of a, b costs anything"):
        parts.shares({"a": 0.0, "b": -1.0})


@pytest.mark.parametrize("missing", ["fp8", "low-wgrad", "low-fprop-but-1"])
def test_a_run_that_is_missing_is_named(missing: str) -> None:
    given = comparison()
    rows = given["tables"][0]["rows"]
    given["tables"][0]["rows"] = [row for row in rows if row["contender"] != missing]
    with pytest.raises(UsageError, match=missing):
        parts.parts_of(given, None)
    with pytest.raises(UsageError, match="one table is wanted, got 2"):
        parts.parts_of({**given, "tables": given["tables"] * 2}, None)
