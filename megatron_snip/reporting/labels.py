"""Labels: names from files, short enough that a picture keeps room for what it shows."""

from __future__ import annotations

MOST = 24
"""Characters of the longest label."""


def label_of(name: str) -> str:
    """Return a name as a label; a longer one loses its middle, as ends tell names apart."""
    return name if len(name) <= MOST else f"{name[:11]}..{name[-11:]}"
