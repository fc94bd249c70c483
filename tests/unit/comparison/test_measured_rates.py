"""Step times from a machine's own seconds."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron_snip.comparison.gemm_rates import other_flops_per_token
from megatron_snip.comparison.measured_rates import check_covers, measured_step_time
from megatron_snip.comparison.schedule import make_schedule
from megatron_snip.comparison.table import Calibration, make_tables
from megatron_snip.comparison.text import columns
from megatron_snip.errors import UsageError
from megatron_snip.planning.calibration import CalibratedLinear, CalibrationTable
from megatron_snip.trainer.config import linear_shapes
from tests.unit.comparison.build import comparison, outcome

CONFIG = comparison(policies=("bf16", "random"), seeds=2)
MODEL = CONFIG.train_config()
FLOPS = {shape.name: shape.flops_per_token for shape in linear_shapes(MODEL)}
TOKENS = 64


def calibrated(names: str, **seconds: tuple[float, float, float]) -> CalibratedLinear:
    """Seconds of fprop, dgrad and wgrad by format, for a GEMM of 128 x 64."""
    gemms = ("fprop", "dgrad", "wgrad")
    by_format = {name: dict(zip(gemms, each, strict=True)) for name, each in seconds.items()}
    return CalibratedLinear(names=names, out_features=128, in_features=64, seconds=by_format)


def table(*linears: CalibratedLinear) -> CalibrationTable:
    return CalibrationTable(
        machine="m", device="a chip", date="d", versions={}, tokens=TOKENS, linears=linears
    )


WHOLE = table(
    calibrated("*.linear_fc1", bf16=(4.0, 4.0, 4.0), fp8=(2.0, 2.0, 2.0), fp3=(1.0, 2.0, 3.0)),
    calibrated("*", bf16=(1.0, 1.0, 1.0), fp8=(2.0, 2.0, 2.0), fp3=(3.0, 3.0, 3.0)),
)


def everywhere(option: str) -> dict[str, dict[str, float]]:
    return {name: {option: 1.0} for name in FLOPS}


def test_bf16_takes_as_long_as_bf16() -> None:
    assert measured_step_time(everywhere("bf16"), WHOLE, MODEL) == pytest.approx(1.0)


def test_seconds_count_by_linear_gemm_and_share_of_the_steps() -> None:
    options = everywhere("bf16")
    first, second = (name for name in FLOPS if name.endswith("linear_fc1"))
    options[first] = {"fp3-fp8-bf16": 0.25, "fp8": 0.75}
    options[second] = {"bf16": 0.5, "fp3": 0.5}
    measured = 6.0 * TOKENS * 128 * 64  # FLOPs that the table's seconds are for
    bf16 = sum((12.0 if "fc1" in name else 3.0) * work / measured for name, work in FLOPS.items())
    saved = FLOPS[first] / measured * (12.0 - 0.25 * (1.0 + 2.0 + 4.0) - 0.75 * 6.0)
    saved += FLOPS[second] / measured * 0.5 * (12.0 - 6.0)
    other = bf16 * other_flops_per_token(MODEL) / sum(FLOPS.values())
    assert measured_step_time(options, WHOLE, MODEL) == pytest.approx(
        (other + bf16 - saved) / (other + bf16)
    )


def test_a_format_that_is_slower_here_makes_a_longer_step() -> None:
    slow = table(calibrated("*", bf16=(1.0, 1.0, 1.0), fp8=(9.0, 9.0, 9.0)))
    assert measured_step_time(everywhere("fp8"), slow, MODEL) > 5.0


def test_runs_that_have_not_kept_their_options_are_unknown() -> None:
    assert math.isnan(measured_step_time({}, WHOLE, MODEL))


def test_a_table_that_lacks_something_is_refused_by_name() -> None:
    check_covers(WHOLE, MODEL, ("fp8", "fp3"))
    with pytest.raises(UsageError, match="no seconds for 'fp4'"):
        check_covers(WHOLE, MODEL, ("fp8", "fp4"))
    with pytest.raises(UsageError, match="no seconds for 'bf16'"):
        check_covers(table(calibrated("*", fp8=(1.0, 1.0, 1.0))), MODEL, ("fp8",))
    with pytest.raises(UsageError, match="no entry for"):
        check_covers(table(WHOLE.linears[0]), MODEL, ("fp8",))


def test_a_table_of_runs_gets_a_column() -> None:
    entries = make_schedule(CONFIG).entries
    outcomes = {}
    for entry in entries:
        kept = everywhere("bf16" if entry.contender == "bf16" else ("fp8", "fp3")[entry.seed])
        outcomes[entry.run.key] = dataclasses.replace(outcome(entry.run.key, 2.0), options=kept)
    (plain,) = make_tables(entries, outcomes)
    assert "a chip" not in plain.rows[0].step_time

    (found,) = make_tables(entries, outcomes, Calibration(WHOLE, MODEL))
    bf16, random = found.rows
    each = [measured_step_time(everywhere(name), WHOLE, MODEL) for name in ("fp8", "fp3")]
    assert bf16.step_time["a chip"] == pytest.approx(1.0)
    assert random.step_time["a chip"] == pytest.approx(sum(each) / 2)
    head, _, row = columns(found)
    assert (head[-1], row[-1]) == ("step, a chip", f"{sum(each) / 2:.2f}")

    last = next(e.run.key for e in entries if e.contender == "random")
    outcomes[last] = dataclasses.replace(outcomes[last], options={})
    (older,) = make_tables(entries, outcomes, Calibration(WHOLE, MODEL))
    assert columns(older)[2][-1] == ""
