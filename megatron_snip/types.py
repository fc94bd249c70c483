"""The shared words: the three GEMMs of a linear, their operands, and how linears are named.

A linear computes, for M tokens, K in_features, N out_features, X [M, K], W [N, K] and
G = dL/dY [M, N]:

    fprop   Y  = X W^T      contraction over K   operands input, weight
    dgrad   dX = G W        contraction over N   operands grad_output, weight
    wgrad   dW = G^T X      contraction over M   operands grad_output, input

A linear's name is the same on every rank and for every TP/PP/VPP layout: Megatron's global
`layer_number` is 1-based and `layers.N` inside a pipeline stage is local, so names are built from
the former and are 0-based: `decoder.layers.17.mlp.linear_fc1`.
"""

import fnmatch
import functools
import re
from enum import StrEnum

from megatron_snip.errors import UsageError, shortened

_MAX_GLOB_CHARACTERS = 500

ITERATION_LIMIT = 2**53
"""Iterations, and settings that take them, are below it: above, floating point is not exact."""


class Gemm(StrEnum):
    """One of the three GEMMs of a linear, named as the field names them."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Operand(StrEnum):
    """A tensor that enters a GEMM."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


GEMM_OPERANDS: dict[Gemm, tuple[Operand, Operand]] = {
    Gemm.FPROP: (Operand.INPUT, Operand.WEIGHT),
    Gemm.DGRAD: (Operand.GRAD_OUTPUT, Operand.WEIGHT),
    Gemm.WGRAD: (Operand.GRAD_OUTPUT, Operand.INPUT),
}
"""Which operands enter each GEMM."""

_NAME = re.compile(
    r"(?P<block>[A-Za-z_][\w.]*)\.layers\.(?P<layer>\d{1,9})\.(?P<module>[\w.]+)", re.ASCII
)


def linear_name(layer_number: int, module: str, block: str = "decoder") -> str:
    """Return the layout-independent name of a linear.

    Args:
        layer_number: Megatron's global, 1-based `TransformerLayer.layer_number`.
        module: path below the layer, e.g. `mlp.linear_fc1`.
        block: the transformer block, e.g. `decoder` or `mtp`.

    Raises:
        ValueError: if `layer_number` is not positive.
    """
    if layer_number < 1:
        raise ValueError(f"layer_number is 1-based, got {layer_number}")
    return f"{block}.layers.{layer_number - 1}.{module}"


def split_linear_name(name: str) -> tuple[str, int, str]:
    """Return (block, 0-based layer index, module) of a name made by `linear_name`.

    Raises:
        UsageError: if `name` does not have that form.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(  # names come from any file
            f"'{shortened(name, 200)}' is not a linear's name; expected e.g. "
            "'decoder.layers.17.mlp.linear_fc1'"
        )
    return match["block"], int(match["layer"]), match["module"]


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key that orders `layers.2` before `layers.10`."""
    return tuple(
        # int() refuses thousands of digits, and digits that are no decimals (superscripts).
        (0, int(part)) if part.isdecimal() and len(part) < 300 else (1, part)
        for part in re.split(r"(\d+)", name)
        if part
    )


def has_wildcards(glob: str) -> bool:
    """Return whether a glob may match more than its own text."""
    return any(character in glob for character in "*?[")


@functools.lru_cache(maxsize=10_000)
def glob_pattern(glob: str) -> re.Pattern[str]:
    """Return what matches the names of a glob (`*`, `?`, `[...]`; case matters).

    Raises:
        UsageError: if the glob is too long: translating it takes quadratic time.
    """
    if len(glob) > _MAX_GLOB_CHARACTERS:
        raise UsageError(
            f"a glob has {len(glob)} characters ('{glob[:40]}...'); at most {_MAX_GLOB_CHARACTERS}"
        )
    return re.compile(fnmatch.translate(glob))


def glob_matches(name: str, glob: str) -> bool:
    """Return whether a linear's name matches a glob; see `glob_pattern`."""
    return glob_pattern(glob).match(name) is not None
