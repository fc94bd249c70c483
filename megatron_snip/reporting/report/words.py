"""Numbers and records as words: what captions, alternative texts and tables say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from megatron_snip.options import Option

_LISTED = 6


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with `digits` significant digits, or a dash."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """Return a share as percent, or a dash."""
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.3g}%"


def seconds(value: float | None) -> str:
    """Return a duration: 40 ms, 12.3 s, 4 min 10 s, 3 h 20 min."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 1:
        return f"{1000 * value:.2g} ms" if value < 0.1 else f"{1000 * value:.0f} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def listing(words: Iterable[str]) -> str:
    """Return a, b, c and 12 more."""
    found = list(words)
    shown = ", ".join(found[:_LISTED])
    return shown if len(found) <= _LISTED else f"{shown} and {len(found) - _LISTED} more"


def joined(words: Sequence[str]) -> str:
    """Return a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def choices(linears: Mapping[str, Option]) -> str:
    """Return how many linears take each option: 12 fp4, 4 fp8."""
    counts = Counter(str(option) for option in linears.values())
    return listing(f"{count} {option}" for option, count in counts.most_common())


def plural(count: int, noun: str) -> str:
    """Return 1 plan, 2 plans."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(text: str) -> str:
    """Return text with every character that a terminal would obey written out as its escape."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
