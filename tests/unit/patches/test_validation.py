"""Settings are checked when Megatron has validated its own: before any process group exists."""

from __future__ import annotations

import logging

import pytest

from megatron_snip.log import forget_warnings
from megatron_snip.patches import validation
from megatron_snip.patches.registry import Registry
from tests.unit.patches.fake_megatron import FakeMegatron


@pytest.fixture(autouse=True)
def installed(fake: FakeMegatron) -> Registry:
    registry = Registry([validation.SEAM, validation.INITIALIZE_SEAM])
    registry.install({"--snip"})
    return registry


def test_megatron_validates_first(fake: FakeMegatron) -> None:
    fake.args.snip_enabled = True
    assert fake.arguments.validate_args(fake.args, {}) is fake.args
    assert [name for name, *_ in fake.calls] == ["validate"]


def test_bad_settings_end_there(fake: FakeMegatron, capsys: pytest.CaptureFixture[str]) -> None:
    vars(fake.args).update(snip_enabled=True, snip_interval="often")
    with pytest.raises(SystemExit) as end:
        fake.arguments.validate_args(args=fake.args)
    assert end.value.code == 2
    assert [name for name, *_ in fake.calls] == ["validate"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron-snip: error: --snip-interval: ")


def test_refused_combinations_end_there(
    fake: FakeMegatron, capsys: pytest.CaptureFixture[str]
) -> None:
    vars(fake.args).update(snip_enabled=True, use_megatron_fsdp=True)
    with pytest.raises(SystemExit):
        fake.arguments.validate_args(fake.args)
    assert "--use-megatron-fsdp" in capsys.readouterr().err


def test_the_command_lines_flags_count_where_the_namespace_lost_them(
    fake: FakeMegatron, installed: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.session.given = {"snip_enabled": True, "snip_policy": "best"}
    with pytest.raises(SystemExit):
        fake.arguments.validate_args(fake.args)
    assert "--snip-policy: unknown policy 'best'" in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_settings_without_effect_are_told_once_a_host(
    fake: FakeMegatron,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
) -> None:
    forget_warnings()
    monkeypatch.setenv("LOCAL_RANK", rank)
    settings = {"snip_policy": "uniform-fp8", "snip_pipeline_balance": "stage"}
    vars(fake.args).update(snip_enabled=True, **settings)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            fake.arguments.validate_args(fake.args)
    assert caplog.text.count("without effect: --snip-pipeline-balance") == (rank == "0")
