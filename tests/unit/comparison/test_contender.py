"""Who takes part, by name."""

from __future__ import annotations

import pytest

from megatron_snip.comparison.contender import BUILT_IN, DEFAULT, LOWEST, make_contender, resolve
from megatron_snip.config import make_config
from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.policies import get_policy


@pytest.mark.parametrize("name", DEFAULT)
def test_every_default_contender_is_one_that_the_planner_knows(name: str) -> None:
    contender = resolve(name, "fp4", {})
    get_policy(contender.policy)
    make_config(dict(contender.settings))


def test_the_lowest_is_the_tables_own() -> None:
    assert resolve(LOWEST, "fp3", {}).uniform == Option.uniform("fp3")
    assert resolve(LOWEST, "fp4", {}).uniform == Option.uniform("fp4")


def test_uniform_and_ordered_contenders_need_no_statistics() -> None:
    measured = {name for name, contender in BUILT_IN.items() if contender.measured}
    assert measured == {"min-abs-err", "min-rel-err", "greedy", "snip-linear", "snip-gemm"}


def test_a_described_contender_is_snip_with_its_settings() -> None:
    mine = make_contender("sharp", {"weight_lambda": 0.01})
    assert mine.policy == "snip"
    assert mine.measured
    assert resolve("sharp", "fp4", {"sharp": mine}) is mine


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mine", {"efficiency_target": 0.5}, "sets 'efficiency_target'; it may set"),
        ("mine", {5: 0.5, "a": 1}, "sets '5'; it may set"),
        ("mine", {"weight_lambda": -1.0}, "weight_lambda"),
        ("mine", {"policy": "best"}, "unknown policy 'best'"),
        ("mine", {"policy": "uniform-fp5"}, "unknown format 'fp5'"),
        ("random", {}, "exists already"),
        ("lowest", {}, "exists already"),
    ],
)
def test_what_contenders_have_in_common_stays_common(
    name: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_contender(name, settings)


def test_an_unknown_contender_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"unknown contender 'snip'; known: bf16.*mine"):
        resolve("snip", "fp4", {"mine": make_contender("mine", {})})


@pytest.mark.parametrize("name", ["", "a/b", "../up", "-x", "a" * 81, "a b", "<a>"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="files are named after it"):
        make_contender(name, {})
