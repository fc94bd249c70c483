"""This tier needs `megatron.training`: megatron-core from 0.17 on, which wants Python 3.12."""

import importlib.util
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.distributed.launch import ROOT
from tests.megatron.lab import Lab

HAS_TRAINING = (
    importlib.util.find_spec("megatron.core") is not None
    and importlib.util.find_spec("megatron.training") is not None
)

collect_ignore_glob = [] if HAS_TRAINING else ["test_*.py"]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with closing(Lab(tmp_path_factory.mktemp("lab"))) as lab:
        yield lab


@pytest.fixture(scope="session")
def te_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Its ranks find Transformer Engine's own Python, and stand-ins of Mamba's kernels."""
    folders = tmp_path_factory.mktemp("lab"), ROOT / "tests" / "stand_ins"
    with closing(Lab(*folders, with_te=True)) as lab:
        yield lab
