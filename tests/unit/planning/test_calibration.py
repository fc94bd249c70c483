import json
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.calibration import CalibrationTable, read_calibration, with_seconds
from megatron_snip.types import Gemm
from tests.unit.planning.build import problem_of


def measured(names: str, size: tuple[int, int], **seconds: tuple[float, ...]) -> dict[str, Any]:
    by_format = {f: dict(zip(map(str, Gemm), times, strict=True)) for f, times in seconds.items()}
    rows, columns = size
    return {"names": names, "out_features": rows, "in_features": columns, "seconds": by_format}


FIRST = measured("*.layers.0.*", (10, 5), fp8=(3.0, 2.0, 1.0), fp4=(1.0, 0.5, 0.25))
SECOND = measured("*.layers.*", (1, 1), fp8=(0.2, 0.2, 0.2), fp4=(0.2, 0.2, 0.1))
TABLE: dict[str, Any] = {
    "version": 1,
    "machine": "a machine",
    "device": "cpu",
    "date": "2026-01-01T00:00:00+00:00",
    "versions": {"torch": "2"},
    "tokens": 2,
    "linears": [FIRST, SECOND],
}
HUGE = {"fprop": 1e308, "dgrad": 1e308, "wgrad": 1e308}
"""Seconds whose sum overflows."""
PROBLEM = problem_of([[0.0, 1.0], [0.0, 0.5]], 0.5, flops=[1200.0, 12.0])


def table(tmp_path: Path, value: dict[str, Any]) -> CalibrationTable:
    (tmp_path / "t.json").write_text(json.dumps(value))
    return read_calibration(tmp_path / "t.json")


def test_seconds_come_from_the_first_match_and_scale_with_flops(tmp_path: Path) -> None:
    measured = table(tmp_path, TABLE)
    first, second = with_seconds(PROBLEM, measured).linears
    # 6 * 2 * 10 * 5 = 600 FLOPs were measured, the linear has twice as many.
    assert [cost.seconds for cost in first.options.values()] == [12.0, 3.5]
    assert [cost.seconds for cost in second.options.values()] == pytest.approx([0.6, 0.5])
    assert measured.seconds(first.name, first.flops, Option.parse("fp4-fp8-fp8")) == 8.0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"version": 2}, "version 1"),
        ({"tokens": 0}, "tokens"),
        ({"linears": [FIRST | {"seconds": {"fp9": {}}}]}, "fp9"),
        ({"linears": [FIRST | {"seconds": {"fp8": {"fprop": 1.0}}}]}, "dgrad"),
        ({"linears": [FIRST | {"mixed_s": 1e308}]}, "mixed_s"),
        ({"linears": [FIRST | {"seconds": {"fp8": HUGE}}]}, "fprop"),
    ],
)
def test_bad_tables_are_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(UsageError, match=r"\Acalibration table [^\n]*\Z") as caught:
        table(tmp_path, TABLE | changes)
    assert word in str(caught.value)


def test_what_was_not_measured_is_named(tmp_path: Path) -> None:
    short = table(tmp_path, TABLE | {"linears": [FIRST]})
    with pytest.raises(UsageError, match=r"no seconds for 'fp8' of 'decoder\.layers\.1"):
        with_seconds(PROBLEM, short)
    with pytest.raises(UsageError, match="no seconds for 'bf16'"):
        short.seconds(PROBLEM.linears[0].name, 1.0, Option.parse("bf16"))
