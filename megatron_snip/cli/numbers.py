"""Numbers from the command line."""

from __future__ import annotations

from megatron_snip.errors import UsageError

LARGEST = 2**31 - 1
"""No size, count or step is larger; and a text of thousands of digits is no number at all."""


def whole_number(flag: str, text: str, least: int = 1) -> int:
    """Return the number that a flag was given.

    Args:
        flag: how the error calls it.
        text: decimal digits.
        least: the smallest that is accepted.

    Raises:
        UsageError: if it is something else, or beyond `LARGEST`.
    """
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()):
        raise UsageError(f"{flag} must be a whole number of at least {least}, got '{text}'")
    if len(digits) > len(str(LARGEST)) or not least <= int(digits) <= LARGEST:
        raise UsageError(f"{flag} must be from {least} to {LARGEST}, got '{text}'")
    return int(digits)
