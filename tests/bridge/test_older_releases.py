"""An older release of Megatron-Bridge trains, measures and plans.

It runs with the packages of the newest one; 0.3 and 0.4 fail with this Megatron-Core.
"""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.bridge.lab import COLLECT_ONLY, SNIP, Lab, losses, weights
from tests.bridge.releases import FOLDER
from tests.megatron.lab import applied_plans, snip_lines


@pytest.fixture(scope="module", params=["0.5.1"])
def release(request: pytest.FixtureRequest) -> str:
    if not (FOLDER / request.param).is_dir():
        pytest.skip(f"megatron-bridge {request.param} is not unpacked below {FOLDER}")
    return str(request.param)


@pytest.fixture(scope="module")
def older(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with closing(Lab(tmp_path_factory.mktemp(release), FOLDER / release)) as lab:
        yield lab


def test_without_snip_and_measuring_change_no_bit(older: Lab, release: str) -> None:
    plain = older.run("llama-tp2", plain=True)
    off = older.run("llama-tp2")
    measured = older.run("llama-tp2", COLLECT_ONLY)
    assert weights(off) == weights(measured) == weights(plain)
    assert losses(off) == losses(measured) == losses(plain)
    found = f"found the functions that it needs in megatron-bridge {release}, "
    assert any(found in line for line in snip_lines(measured)), measured.report


def test_plans_are_made_and_run(older: Lab) -> None:
    run = older.run("llama-tp2", SNIP)
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    assert losses(run)[-1] != losses(older.run("llama-tp2"))[-1]
