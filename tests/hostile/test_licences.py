"""What the quickstart installs is pinned, and its licences are listed and let it be used freely."""

from __future__ import annotations

import re

from tests.hostile.licences import LICENCES, LOCK, locked

FREE = re.compile(
    r"MIT|BSD|Apache|ISC|MPL|Mozilla|PSF|Python Software Foundation|Zlib|BSL|LLVM", re.IGNORECASE
)
DEVELOPMENT_ONLY = {"codespell"}
"""GPL; run by `make lint`, never imported and not shipped."""


def test_every_package_is_pinned_exactly() -> None:
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        assert not line or line.startswith("#") or re.fullmatch(r"[\w.\-]+==[\w.!]+", line), line


def test_every_licence_is_listed_and_free() -> None:
    listed = dict(line.split(": ", 1) for line in LICENCES.read_text(encoding="utf-8").splitlines())
    assert sorted(listed) == sorted(locked()), "python -m tests.hostile.licences"
    odd = {name: text for name, text in listed.items() if not FREE.search(text)}
    assert set(odd) <= DEVELOPMENT_ONLY
