"""Hostile files, made from good ones: schema-aware changes of values, and damage to the text.

A mutant is one of

    a value somewhere in the document replaced by another one (wrong type, huge, NaN, a path)
    a key somewhere removed, renamed, added, or written twice
    the text cut, with a piece taken out, repeated or turned into other bytes
    the document wrapped in, or replaced by, deep nesting
"""

import copy
import json
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]

DEEP = "[" * 100_000
VALUES: tuple[str, ...] = (
    "null",
    "true",
    "-1",
    "0",
    "1e308",
    "-1e308",
    "1e999",
    "NaN",
    "-Infinity",
    "1" + "0" * 400,
    "9" * 5000,
    "1e-320",
    '""',
    '"../../../etc/passwd"',
    '"/etc/passwd"',
    '"\\u0000"',
    '"\\ud800"',
    '"a\\nb"',
    '"<script>alert(1)</script>"',
    '"' + "x" * 100_000 + '"',
    "[]",
    "{}",
    "[[[[[[[[]]]]]]]]",
    '{"fprop": "fp4"}',
    "2026-13-45",
)
"""JSON texts (the last ones are not)."""


def paths(value: Any, here: Path = ()) -> list[Path]:
    """Return the place of every value in a document, its root included."""
    found: list[Path] = [here]
    if isinstance(value, dict | list):
        items: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            found += paths(item, (*here, key))
    return found


def with_text(value: Any, at: Path, text: str) -> str:
    """Return the document with `text` in place of the value at a place."""
    marker, root = "@@hostile@@", [copy.deepcopy(value)]
    target: Any = root
    *before, last = (0, *at)
    for step in before:
        target = target[step]
    target[last] = marker
    return json.dumps(root[0]).replace(json.dumps(marker), text, 1)


def _keys_changed(value: Any, at: Path, how: str, name: str) -> str:
    """Return the document with a key of the object at a place changed, as text."""
    target = value
    for step in at:
        target = target[step]
    if not isinstance(target, dict) or not target:
        return with_text(value, at, "null")
    (key, item), *rest = target.items()
    changed = {
        "removed": json.dumps(dict(rest)),
        "renamed": json.dumps({name: item, **dict(rest)}),
        "added": json.dumps({**target, name: 1}),
        "twice": f"{{{json.dumps(key)}: {json.dumps(item)}, {json.dumps(target)[1:]}",
    }
    return with_text(value, at, changed[how])


def changed_documents(value: Any) -> st.SearchStrategy[str]:
    """Return a strategy of documents in which one value or key of a good one is another."""
    places = st.sampled_from(paths(value))
    return st.one_of(
        st.builds(lambda at, new: with_text(value, at, new), places, VALUES_STRATEGY),
        st.builds(
            lambda at, how, name: _keys_changed(value, at, how, name),
            places,
            st.sampled_from(["removed", "renamed", "added", "twice"]),
            st.sampled_from(["", "x", "__class__", "../x", "version", "\u0000"]),
        ),
    )


def mutants(value: Any) -> st.SearchStrategy[bytes]:
    """Return a strategy of hostile files made from a good document."""
    text = json.dumps(value)
    positions = st.integers(0, len(text))
    return st.one_of(
        changed_documents(value).map(str.encode),
        st.builds(lambda a: text[:a].encode(), positions),
        st.builds(
            lambda a, b: (text[: min(a, b)] + text[max(a, b) :]).encode(), positions, positions
        ),
        st.builds(lambda a, b: (text[:a] + text[b:]).encode(), positions, positions),
        st.builds(lambda a, junk: text.encode()[:a] + junk + text.encode()[a:], positions, JUNK),
        st.sampled_from([DEEP, DEEP + "]" * 100_000, '{"a":' * 50_000, "", " "]).map(str.encode),
    )


VALUES_STRATEGY = st.one_of(
    st.sampled_from(VALUES), st.integers().map(str), st.text(max_size=20).map(json.dumps)
)
JUNK = st.one_of(
    st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff\xfe", b"\x00", b"&a *a"])
)
