"""Numbers as text, for tables, captions and terminals."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from megatron_snip.errors import listing, printable
from megatron_snip.options import Option

SOLVER_NOISE = 1e-9
"""Quality losses and gaps below this are shown as 0: the solver's arithmetic is no more exact."""


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with `digits` significant digits, or a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}g}"


def quality(value: float | None, digits: int = 4) -> str:
    """Return a quality loss or a gap; solver noise is shown as 0."""
    if value is not None and abs(value) < SOLVER_NOISE:
        value = 0.0
    return number(value, digits)


def column(values: Sequence[float | None], noise: float = 0.0) -> list[str]:
    """Return the numbers of a table's column with the same number of decimals.

    The largest has four significant digits. Where that would leave the smallest without any, all
    have an exponent. Values below `noise` are 0; None, NaN and infinity are a dash.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    sizes = [abs(value) for value in known if abs(value) > noise] or [1.0]
    decimals = max(0, 3 - math.floor(math.log10(max(sizes))))
    exact = decimals <= 6 and round(min(sizes), decimals) > 0.0
    spec = f".{decimals}f" if exact else ".2e"
    shown = [0.0 if v is not None and abs(v) <= noise else v for v in values]
    return ["-" if v is None or not math.isfinite(v) else f"{v:{spec}}" for v in shown]


def percent(value: float | None) -> str:
    """Return a share as percent, or a dash."""
    return "-" if value is None or not math.isfinite(value) else f"{quality(100 * value, 3)}%"


def seconds(value: float | None) -> str:
    """Return a duration: 40 ms, 12.3 s, 4 min 10 s, 3 h 20 min; or a dash."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 0:
        return "-" + seconds(-value)
    if value < 1:
        return f"{1000 * value:.2g} ms" if value < 0.0995 else f"{1000 * value:.0f} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def option_counts(linears: Mapping[str, Option]) -> str:
    """Return how many linears have each option: `12 fp4, 4 fp8`."""
    counts = Counter(str(option) for option in linears.values())
    return listing([f"{count} {option}" for option, count in counts.most_common()])


def label(name: str) -> str:
    """Return a name of at most 24 printable characters; a longer one loses its middle."""
    name = printable(name)
    return name if len(name) <= 24 else f"{name[:11]}..{name[-11:]}"
