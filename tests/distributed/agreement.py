"""What two layouts of the same model and data must agree in.

Layouts add in another order, so X, W and G differ by a relative 1e-7. Some elements then round to
the other neighbour. One such element changes a sum by a relative 1e-4 to 3e-2 at this size. A rank
that is counted twice, or not at all, changes every entry of a column by a factor. So at least 96 %
of the divergences and of the statistics must agree to 1e-3.
"""

from typing import Any

import pytest

RTOL = 1e-3
FLIPPED_RTOL = 4e-2
FLIPPED_SHARE = 0.04
"""Of about 500 statistics and 160 divergences. An element that rounds the other way changes one
statistic and up to three divergences; which elements do depends on the CPU."""
PLACE = ("stage", "chunk", "layer_in_chunk")
"""Where a linear is: in another layout it is elsewhere."""


def check_agreement(result: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert result["losses"][:4] == pytest.approx(wanted["losses"][:4], rel=1e-5)
    # The plan runs from the fifth step on, and rounds what is added in another order.
    assert result["losses"][4:] == pytest.approx(wanted["losses"][4:], rel=1e-3)
    found = result["statistics"]
    expected = wanted["statistics"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert list(found["linears"]) == list(expected["linears"])  # the order, too
    check_divergences(result["divergences"], wanted["divergences"])
    check_errors(
        {
            (name, key): abs(found["linears"][name][key] - value) / (abs(value) or 1.0)
            for name, row in expected["linears"].items()
            for key, value in row.items()
            if key not in PLACE
        }
    )
    check_health(result["health"], wanted["health"])
    assert (result["plan"], result["history"]) == (wanted["plan"], wanted["history"])
    assert result["warnings"] == []


def check_health(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert a["name"] == b["name"]
        for key in ("gradient_norm", "amax"):
            assert a[key] == pytest.approx(b[key], rel=RTOL), (a["name"], key)
        for fmt, operands in b["operands"].items():
            for operand, wanted in operands.items():
                values = a["operands"][fmt][operand]
                assert values["sqnr_db"] == pytest.approx(wanted["sqnr_db"], abs=0.1)
                # What cancels to zero in one order of sums is tiny, and underflows, in another.
                assert values["underflow"] == pytest.approx(wanted["underflow"], abs=5e-3)
                assert values["scale_log2"][1] == pytest.approx(wanted["scale_log2"][1], abs=1)
                worst = values["worst_expert"]
                assert worst.keys() == wanted["worst_expert"].keys()
                assert bool(worst) == ("experts" in a["name"])
                for measure, (expert, value) in wanted["worst_expert"].items():
                    assert worst[measure] == [expert, pytest.approx(value, rel=RTOL, abs=5e-3)]


def check_divergences(found: dict[str, Any], expected: dict[str, Any]) -> None:
    errors = {
        (name, option, key): abs(found[name][option][key] - value) / (abs(value) or 1.0)
        for name, options in expected.items()
        for option, values in options.items()
        for key, value in values.items()
    }
    check_errors(errors)


def check_errors(errors: dict[Any, float]) -> None:
    far = {place: error for place, error in errors.items() if error > RTOL}
    assert len(far) <= FLIPPED_SHARE * len(errors), far
    assert max(errors.values()) < FLIPPED_RTOL, far
