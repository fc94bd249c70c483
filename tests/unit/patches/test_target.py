"""Targets: found by name and signature, against the installed megatron-core."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
from megatron.core import package_info
from megatron.core.tensor_parallel import layers

from megatron_snip.errors import UnsupportedError
from megatron_snip.log import forget_warnings
from megatron_snip.patches.seams import LINEAR_TARGETS
from megatron_snip.patches.target import Target, check_version, core_version, version_is_tested


def test_the_linears_of_the_installed_megatron_are_found() -> None:
    column, row = LINEAR_TARGETS
    assert column.find() is layers.ColumnParallelLinear._forward_impl
    assert row.owner() is layers.RowParallelLinear
    assert column.problem() is None and row.problem() is None


def test_a_missing_function_is_named() -> None:
    target = Target("megatron.core.tensor_parallel.layers", "no_such_function")
    with pytest.raises(UnsupportedError) as error:
        target.find()
    text = str(error.value)
    assert "megatron.core.tensor_parallel.layers.no_such_function" in text
    assert core_version() in text and "0.16" in text


def test_a_missing_parameter_is_named() -> None:
    name = "ColumnParallelLinear._forward_impl"
    target = Target("megatron.core.tensor_parallel.layers", name, ("input", "weight"))
    assert target.problem() is None
    module = ModuleType("fake_layers")
    module.function = lambda input: None  # type: ignore[attr-defined]
    sys.modules["fake_layers"] = module
    try:
        problem = Target("fake_layers", "function", ("input", "weight")).problem()
        assert problem is not None and "takes no weight" in problem
        module.function = lambda **kwargs: None  # type: ignore[attr-defined]
        assert Target("fake_layers", "function", ("input", "weight")).problem() is None
    finally:
        del sys.modules["fake_layers"]


def test_a_module_that_cannot_be_imported_is_named() -> None:
    problem = Target("megatron.core.no_such_module", "function").problem()
    assert problem is not None and "cannot import megatron.core.no_such_module" in problem


@pytest.mark.parametrize("version", ["0.16.0", "0.16.1", "0.17.1", "0.19.2", "0.19.0rc1+local"])
def test_tested_releases(version: str) -> None:
    assert version_is_tested(version)


@pytest.mark.parametrize("version", ["0.15.9", "0.20.0", "1.16.1"])
def test_other_releases(version: str) -> None:
    assert not version_is_tested(version)


def test_an_unknown_release_warns_once_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(package_info, "__version__", "0.21.0")
    forget_warnings()
    with caplog.at_level(logging.WARNING):
        check_version(strict=False)
        check_version(strict=False)
    assert [r.message for r in caplog.records if "0.21.0 was not tested" in r.message] != []
    assert len(caplog.records) == 1
    with pytest.raises(UnsupportedError, match=r"0\.21\.0 was not tested.*--snip-strict-version"):
        check_version(strict=True)
