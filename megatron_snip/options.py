"""What a linear may choose: the formats its three GEMMs take together.

An option is written `fp4` when the three formats agree and `fprop-dgrad-wgrad` otherwise, e.g.
`fp4-fp8-bf16`. `MIXED` has names for those that papers and users run.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import ConfigDict

from megatron_snip.errors import UsageError, shortened
from megatron_snip.formats import get_format, lowest_precision
from megatron_snip.types import Gemm

Granularity = Literal["linear", "gemm"]

MIXED = {
    "fp8-forward-fp4-backward": ("fp8", "fp4", "fp4"),
    "fp4-forward-mxfp8-backward": ("fp4", "mxfp8", "mxfp8"),
}
"""Options of several formats by name -> formats of fprop, dgrad and wgrad."""


@dataclass(frozen=True, order=True)
class Option:
    """The formats (by name) of a linear's three GEMMs.

    Raises:
        UsageError: if a format is unknown.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    fprop: str
    dgrad: str
    wgrad: str

    def __post_init__(self) -> None:
        for gemm in Gemm:
            get_format(self[gemm])

    def __getitem__(self, gemm: Gemm) -> str:
        """Return the format's name for one GEMM."""
        return str(getattr(self, gemm.value))

    def __str__(self) -> str:
        """Return the option as users write it; `Option.parse` reads it back."""
        if self.fprop == self.dgrad == self.wgrad:
            return self.fprop
        return f"{self.fprop}-{self.dgrad}-{self.wgrad}"

    @property
    def formats(self) -> tuple[str, str, str]:
        """The three formats in the order fprop, dgrad, wgrad."""
        return (self.fprop, self.dgrad, self.wgrad)

    @property
    def gemm_bits(self) -> list[int]:
        """The bits of each GEMM's format: fprop, dgrad, wgrad."""
        return [get_format(name).bits for name in self.formats]

    @property
    def bits(self) -> int:
        """The sum of the bits of its formats."""
        return sum(self.gemm_bits)

    def share_in(self, format_name: str) -> float:
        """Share of the linear's FLOPs that run in `format_name`: 0, 1/3, 2/3 or 1.

        The three GEMMs of a linear have the same number of FLOPs (2 M N K each); formats of as many
        bits count alike.
        """
        bits = get_format(format_name).bits
        return sum(get_format(name).bits == bits for name in self.formats) / 3

    @classmethod
    def uniform(cls, format_name: str) -> Self:
        """The option that uses one format in all three GEMMs."""
        return cls(format_name, format_name, format_name)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `fp4`, `fp4-fp8-bf16` or a name in `MIXED`.

        Raises:
            UsageError: if the text has another form or names an unknown format.
        """
        if text in MIXED:
            fprop, dgrad, wgrad = MIXED[text]
            return cls(fprop, dgrad, wgrad)
        parts = text.split("-")
        if len(parts) == 1:
            return cls.uniform(parts[0])
        if len(parts) == 3:
            fprop, dgrad, wgrad = parts
            return cls(fprop, dgrad, wgrad)
        raise UsageError(
            f"'{shortened(text, 80)}' is not an option; write one format (fp4), three as "
            f"fprop-dgrad-wgrad (fp4-fp8-bf16), or {' or '.join(MIXED)}"
        )


BF16 = Option.uniform("bf16")
"""The option that leaves a linear as Megatron runs it."""

Refusals = Mapping[Option, Mapping[str, str]]
"""Option -> linears that cannot run it -> reason."""


def formats_in(entries: Iterable[str]) -> tuple[str, ...]:
    """Return the names of all formats in entries of `--snip-formats`, each once.

    Raises:
        UsageError: if an entry is neither a format nor an option.
    """
    names: dict[str, None] = {}
    for entry in entries:
        names |= dict.fromkeys(Option.parse(entry).formats)
    return tuple(names)


def enumerate_options(entries: tuple[str, ...], granularity: Granularity) -> tuple[Option, ...]:
    """Return the options a linear can choose from, each once.

    The first option has the most bits, and the last one has the fewest. With `linear` the bits
    fall from option to option. With `gemm` the options are sorted by the bits of fprop, then of
    dgrad, then of wgrad.

    Args:
        entries: The formats, or options of several formats, that a plan may use.
        granularity: `linear` gives one option per entry, `gemm` every combination of formats.

    Raises:
        UsageError: if there are none, or one names an unknown format.
    """
    lowest_precision(formats_in(entries))  # refuses an empty or unknown list
    if granularity == "linear":
        options = dict.fromkeys(Option.parse(entry) for entry in entries)
        return tuple(sorted(options, key=lambda option: -option.bits))
    ordered = sorted(formats_in(entries), key=lambda name: -get_format(name).bits)
    return tuple(Option(*formats) for formats in itertools.product(ordered, repeat=3))


def nearest_option(option: Option, candidates: Iterable[Option]) -> Option:
    """Return `option` if it is a candidate, else the nearest one of no lower precision, else BF16.

    "Of no lower precision": with at least as many bits in every GEMM. The nearest one of these has
    the fewest bits in total; it is the first of them on a tie.
    """
    options = (*candidates, BF16)
    if option in options:
        return option

    def is_no_lower(other: Option) -> bool:
        pairs = zip(other.gemm_bits, option.gemm_bits, strict=True)
        return all(bits >= least for bits, least in pairs)

    return min(filter(is_no_lower, options), key=lambda other: other.bits)


def reasons(refused: Mapping[str, str]) -> str:
    """Return the first three distinct reasons why linears cannot run an option, in one line."""
    distinct = list(dict.fromkeys(refused.values()))
    more = f" and {len(distinct) - 3} other reasons" if len(distinct) > 3 else ""
    return "; ".join(distinct[:3]) + more
