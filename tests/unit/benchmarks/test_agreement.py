"""How agreement with brute force is counted."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.agreement import agreement, ceiling, mean_agreement
from tests.unit.divergence.build import errors, linear, table


def test_a_truth_under_noise_agrees_with_itself_less() -> None:
    truth = np.arange(24.0)
    assert ceiling(truth, 0.0) == pytest.approx(1.0)
    some, much = ceiling(truth, 3.0), ceiling(truth, 100.0)
    assert 0.85 < some < 0.97
    assert abs(much) < 0.2


def test_agreement_is_the_mean_over_draws() -> None:
    truth = np.array([1.0, 2.0, 3.0, 4.0])
    draws = [
        table(*(linear(i, fp4=errors(size)) for i, size in enumerate(sizes)))
        for sizes in ((1.0, 2.0, 3.0, 4.0), (4.0, 3.0, 2.0, 1.0), (1.0, 2.0, 4.0, 3.0))
    ]
    found = mean_agreement(draws, "fp4", lambda _, f: f.fisher, truth)
    each = [agreement(np.array([s.formats["fp4"].fisher for s in t.linears]), truth) for t in draws]
    assert found["spearman"] == pytest.approx((1.0 - 1.0 + each[2].spearman) / 3)
    assert found["median_ratio"] == pytest.approx(np.mean([e.median_ratio for e in each]))
