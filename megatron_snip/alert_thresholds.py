"""Thresholds of `--snip-alert`: measures of health, and the limits beyond which a linear alerts.

A threshold is MEASURE>X or MEASURE<X, such as `underflow>0.3` or `sqnr_db<20`.
"""

import math
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, cast, get_args

from megatron_snip.errors import UsageError, did_you_mean

HealthMeasure = Literal[
    "sqnr_db",
    "underflow",
    "saturated",
    "scale_spread",
    "amax",
    "gradient_norm",
    "gradient_noise",
]
"""Measures of health; docs/glossary.md defines them."""

_MEASURES = get_args(HealthMeasure)
_GONE = {"gemm_sqnr_db": "sqnr_db", "update_ratio": "gradient_norm"}
"""Measures up to 0.2, and what to watch instead."""
_THRESHOLD = re.compile(
    rf"({'|'.join(_MEASURES)})\s*([<>])\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
)


class AlertThreshold(NamedTuple):
    """A threshold.

    Attributes:
        text: the threshold as logs show it, such as `underflow>0.3`.
        measure: the measure of health.
        sign: 1 if values above the limit alert, -1 if values below it do.
        limit: the limit.
    """

    text: str
    measure: HealthMeasure
    sign: float
    limit: float


def parse_thresholds(texts: Iterable[str]) -> tuple[AlertThreshold, ...]:
    """Return thresholds; their texts are in one form: `underflow > .30` becomes `underflow>0.3`.

    Raises:
        UsageError: if a text is not a threshold.
    """
    found: dict[str, AlertThreshold] = {}
    for given in texts:
        match = _THRESHOLD.fullmatch(given)
        if match is None or not math.isfinite(float(match[3])):
            first_word = re.split(r"\W", given)[0]
            if first_word in _GONE:
                text = f"'{given}': {first_word} is not measured; use {_GONE[first_word]}"
                raise UsageError(text)
            is_misspelled = first_word != "" and first_word not in _MEASURES
            hint = did_you_mean(first_word, _MEASURES) if is_misspelled else ""
            raise UsageError(
                f"'{given}' is not MEASURE>X or MEASURE<X{hint}; measures: {', '.join(_MEASURES)}"
            )
        measure, sign, number = match.groups()
        limit = float(number) + 0.0  # -0.0 + 0.0 is 0.0
        text = f"{measure}{sign}{str(limit).removesuffix('.0')}"
        direction = 1.0 if sign == ">" else -1.0
        found[text] = AlertThreshold(text, cast(HealthMeasure, measure), direction, limit)
    return tuple(found.values())
