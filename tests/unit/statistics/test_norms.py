"""`--snip-measure norms`: norms of operands and of their errors, and nothing of products."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_snip.statistics import measure
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.records import BASE_COLUMNS, FORMAT_COLUMNS, PRODUCT_COLUMNS
from megatron_snip.statistics.sample import MeasureSettings, draw_sample
from megatron_snip.topology import Axis, Topology
from megatron_snip.types import Gemm, Operand
from tests.unit.statistics.equations import (
    FORMATS,
    SEED,
    STEP,
    Toy,
    is_of_products,
    largest_error,
    row_of,
    wanted_norms,
)
from tests.unit.statistics.health_definitions import check_health

PRODUCTS = MeasureSettings(FORMATS, STEP, SEED, all_tokens=True)
NORMS = replace(PRODUCTS, products=False)


@pytest.mark.parametrize(("kind", "grad_scale"), [("column", 1.0), ("row", 0.125)])
def test_norms_are_what_their_definitions_say_and_products_are_not_a_number(
    kind: str, grad_scale: float
) -> None:
    toy = Toy.make(kind)
    found = row_of(toy.observed(Topology(), NORMS, grad_scale=grad_scale))
    measured = {name: value for name, value in found.items() if not is_of_products(name)}
    assert largest_error(measured, wanted_norms(toy, grad_scale)) < 2e-5
    of_products = [value for name, value in found.items() if is_of_products(name)]
    assert of_products and all(map(math.isnan, of_products))
    assert toy.health is not None
    (health,) = toy.health.to_dict()["linears"]
    check_health(health, toy, grad_scale)
    nothing = dict.fromkeys(Gemm)
    assert health["gemm_sqnr_db"] == dict.fromkeys(FORMATS, nothing)


def test_the_columns_of_products_are_columns() -> None:
    assert {*BASE_COLUMNS, *FORMAT_COLUMNS} > PRODUCT_COLUMNS


def test_of_all_tokens_norms_and_health_have_the_bits_that_products_give() -> None:
    toy = Toy.make("column")
    by_products = row_of(toy.observed(Topology(), PRODUCTS))
    health = toy.health
    by_norms = row_of(toy.observed(Topology(), NORMS))
    for name, value in by_norms.items():
        if not is_of_products(name) and not name.endswith("grad_error_square"):
            assert value == by_products[name], name
    assert health is not None and toy.health is not None
    (one,), (other,) = (each.to_dict()["linears"] for each in (health, toy.health))
    assert one.pop("gemm_sqnr_db") != other.pop("gemm_sqnr_db")
    assert one == other


def test_the_sample_is_the_single_tokens_that_products_draw() -> None:
    settings = replace(NORMS, all_tokens=False)
    sample = draw_sample(settings, 4096, 3)
    other = draw_sample(replace(settings, products=True), 4096, 3)
    assert torch.equal(sample.rows.indices, other.rows.indices[other.single])
    assert len(sample.rows) == 4096 // 16
    assert set(sample.expansions.values()) == {16.0}
    assert sample.first_feature is None


def test_a_sample_is_without_bias() -> None:
    """Mean over 40 samples against 4 rounds of all tokens, to 4 standard errors."""
    toy = Toy.make("row", microbatches=1, tokens=2048)

    def rows(steps: int, all_tokens: bool) -> list[dict[str, float]]:
        each = [replace(NORMS, iteration=i, all_tokens=all_tokens) for i in range(steps)]
        return [row_of(toy.observed(Topology(), settings)) for settings in each]

    samples, complete = rows(40, False), rows(4, True)
    for name in samples[0]:
        if is_of_products(name):
            continue
        found = np.array([row[name] for row in samples])
        wanted = np.array([row[name] for row in complete])
        error = math.sqrt(found.var() / len(found) + wanted.var() / len(wanted))
        difference = abs(found.mean() - wanted.mean())
        assert difference <= 4 * error + 2e-3 * abs(wanted.mean()), name


@pytest.mark.parametrize("tokens", [0, 1, 130])
def test_experts_with_few_tokens_or_none(tokens: int) -> None:
    toy = Toy.make("column", microbatches=1)
    toy.inputs = [torch.randn(tokens, 256)]
    toy.grads = [torch.randn(tokens, 512)]
    found = row_of(toy.observed(Topology(), replace(NORMS, all_tokens=False)))
    assert (found["tokens"], found["microbatches"]) == (tokens, 1.0)
    assert (found["fp4.grad_error_square"] > 0) == (tokens > 0)
    assert found["fp4.weight_error_square"] > 0


def test_two_senders_give_the_bits_of_two_calls_and_quantize_w_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = Toy.make("column")
    place = replace(toy.placement(Topology()), expert=3)
    real = measure.quantize_dequantize_operands
    calls: Counter[tuple[Operand, Gemm]] = Counter()

    def counted(entries: Any, fmt: Any) -> Any:
        calls.update((entry.operand, entry.gemm) for entry in entries)
        return real(entries, fmt)

    monkeypatch.setattr(measure, "quantize_dequantize_operands", counted)

    def observed(xs: Any, gs: Any, topology: Topology, parts: Any) -> Any:
        observer = StepObserver(NORMS, topology, {}, lambda placement, rows: parts)
        weight = toy.weight.clone().requires_grad_()
        for x, g in zip(xs, gs, strict=True):
            observer.observe(place, x, weight, torch.nn.functional.linear(x, weight)).backward(g)
        statistics, health = observer.table([place.info], 1.0, None)
        return statistics.to_dict(), health.to_dict()  # NaN is None there

    parts = dict(enumerate(torch.arange(2 * 128).split(128)))
    together = observed(
        [torch.cat(toy.inputs)], [torch.cat(toy.grads)], Topology(data=Axis(0, 2)), parts
    )
    number = len(FORMATS)
    assert calls == {
        (Operand.WEIGHT, Gemm.FPROP): number,
        (Operand.INPUT, Gemm.FPROP): 2 * number,
        (Operand.GRAD_OUTPUT, Gemm.DGRAD): 2 * number,
    }
    assert together == observed(toy.inputs, toy.grads, Topology(), None)


def test_gradient_noise_is_estimated_from_the_errors_of_the_operands() -> None:
    toy = Toy.make("column")
    place = toy.placement(Topology())
    gradient = torch.tensor([4.0, 0.0, 1.0], dtype=torch.float64)  # |dL/dW|^2, and one gradient
    noises = []
    for settings in (PRODUCTS, NORMS):
        observer = StepObserver(settings, Topology(), {})
        weight = toy.weight.clone().requires_grad_()
        for x, g in zip(toy.inputs, toy.grads, strict=True):
            observer.observe(place, x, weight, torch.nn.functional.linear(x, weight)).backward(g)
        _, health = observer.table([place.info], 1.0, None, lambda: {place.name: gradient})
        noises.append(health.linears[0].gradient_noise)
    for fmt in FORMATS:
        of_products, of_norms = (found[fmt] for found in noises)
        error = sum(float((toy.wgrad_error(fmt, m) ** 2).sum()) for m in range(2))
        assert of_products == pytest.approx(math.sqrt(3 * error / 4), rel=1e-4)
        assert of_norms == pytest.approx(of_products, rel=0.35) and of_norms != of_products
