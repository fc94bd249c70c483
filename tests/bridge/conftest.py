"""This tier needs megatron-bridge, which wants Python 3.12."""

import importlib.util
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.bridge.lab import Lab

HAS_BRIDGE = (
    importlib.util.find_spec("megatron.core") is not None
    and importlib.util.find_spec("megatron.bridge") is not None
)

collect_ignore_glob = [] if HAS_BRIDGE else ["test_*.py"]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with closing(Lab(tmp_path_factory.mktemp("lab"))) as lab:
        yield lab
