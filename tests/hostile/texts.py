"""Hostile texts, of which every name and label of a file may be one."""

from hypothesis import strategies as st

PIECES = ["\n", "\r", "\x00", "\x1b[2J", "\x85", "\u2028", "\u202e", "'", '"', ",", ";", "\t"]
PIECES += ["=cmd|'/C calc'!A0", "+1", "-1", "@SUM(1)", "#", ": ", "- ", "---", "!!python/none x"]
PIECES += ["<script>", "</td>", "&amp;", "[red]", ":smile:", "{{ 7 }}", "%s", "\ud800", "\x07"]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=6).map("".join)
"""Text of a hostile file: control characters, quotes, line breaks, tags and formulas."""
