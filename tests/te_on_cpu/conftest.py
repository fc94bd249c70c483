"""Tests of the replaced extension, in a process of their own that finds Transformer Engine.

    SNIP_TE_ON_CPU=1 pytest tests/te_on_cpu

`tests/unit/linears/test_te_on_cpu.py` starts it.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

if os.environ.get("SNIP_TE_ON_CPU") == "1":
    from tests import te_on_cpu

    te_on_cpu.install()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def gpu() -> Iterator[ExitStack]:
    """Enter `capability.on` here to be on another GPU for the rest of the test."""
    with ExitStack() as stack:
        yield stack
