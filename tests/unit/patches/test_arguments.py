"""The argument parser's seam."""

from __future__ import annotations

import argparse

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.flags import flag_name
from megatron_snip.patches import arguments, cpu
from megatron_snip.patches.registry import Registry
from tests.unit.patches.fake_megatron import FakeMegatron


def make_parser(fake: FakeMegatron) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = fake.arguments.add_megatron_arguments(
        argparse.ArgumentParser(allow_abbrev=False)
    )
    return parser


@pytest.fixture
def installed(fake: FakeMegatron) -> FakeMegatron:
    Registry([arguments.SEAM]).install({"always"})
    return fake


def test_every_setting_is_a_flag(installed: FakeMegatron) -> None:
    known = {s for action in make_parser(installed)._actions for s in action.option_strings}
    fields = [f for f in SnipConfig.model_fields if f != "enabled"]
    assert {flag_name("snip-", field) for field in fields} <= known
    assert {"--snip", "--no-snip", "--snip-config", "--snip-plan", "--lr"} <= known


def test_the_namespace_is_megatrons_unless_flags_are_given(installed: FakeMegatron) -> None:
    plain = {"lr": 0.1, "distributed_backend": "nccl"}
    assert vars(make_parser(installed).parse_args([])) == plain
    given = vars(make_parser(installed).parse_args(["--snip", "--snip-plan", "plan.json"]))
    assert given == {**plain, "snip_enabled": True, "snip_plan_file": "plan.json"}


def test_help_can_be_printed_in_spite_of_stray_percent_signs(installed: FakeMegatron) -> None:
    """Megatron 0.19 has one in its texts, on which argparse fails."""
    text = make_parser(installed).format_help()
    assert "50% of what it was" in text
    assert "--snip-efficiency-target" in text


def test_a_cpu_run_has_defaults_that_flags_override(
    installed: FakeMegatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "is_installed", lambda: True)
    assert make_parser(installed).parse_args([]).distributed_backend == "gloo"
    words = ["--distributed-backend", "nccl"]
    assert make_parser(installed).parse_args(words).distributed_backend == "nccl"
    assert not hasattr(make_parser(installed).parse_args([]), "transformer_impl")  # no such flag
