"""The probe's signal-to-noise ratio, and what is said when it is poor."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron_snip.statistics.probe_quality import (
    FLOOR_DB,
    poor_probe_warning,
    poor_probes,
    probe_snr_db,
)
from megatron_snip.statistics.records import LinearStatistics

CLEAR = LinearStatistics(
    "decoder.layers.0.mlp.linear_fc1",
    0,
    128,
    256,
    6.0,
    probe_grad_square=11.0,
    probe_grad_noise=1.0,
    probe_input_square=101.0,
    probe_input_noise=1.0,
)


def changed(**values: float | str) -> LinearStatistics:
    return dataclasses.replace(CLEAR, **values)  # type: ignore[arg-type]


def test_the_poorer_of_both_counts() -> None:
    assert probe_snr_db(CLEAR) == pytest.approx(10.0)
    assert probe_snr_db(changed(probe_input_square=2.0)) == pytest.approx(0.0)


def test_fp32_compute_has_no_noise() -> None:
    assert probe_snr_db(changed(probe_grad_noise=0.0, probe_input_noise=0.0)) is None


def test_what_the_probe_cannot_change_does_not_count() -> None:
    assert probe_snr_db(changed(probe_input_square=0.0)) == pytest.approx(10.0)


def test_nothing_but_rounding_is_the_floor() -> None:
    assert probe_snr_db(changed(probe_grad_square=0.5)) == FLOOR_DB
    nan = probe_snr_db(changed(probe_grad_square=math.nan))
    assert nan is not None  # the other one still tells


def test_the_warning_names_the_poorest_and_a_remedy() -> None:
    linears = [
        CLEAR,
        changed(name="poor", probe_grad_square=1.5),
        changed(name="poorest", probe_grad_square=1.1),
    ]
    assert poor_probes(linears) == ["poorest", "poor"]
    warning = poor_probe_warning(linears)
    assert warning is not None
    assert "at poorest and 1 more" in warning
    assert "probe_relative_step" in warning
    assert poor_probe_warning([CLEAR]) is None
