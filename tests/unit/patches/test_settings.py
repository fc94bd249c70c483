"""From flags and YAML to settings; messages name the flag."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.patches.arguments import add_snip_arguments
from megatron_snip.patches.settings import (
    idle_settings,
    naming_flags,
    read_wish,
    snip_config,
)


def namespace(*words: str, **megatron: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_snip_arguments(parser)
    args = parser.parse_args(words)
    for name, value in megatron.items():
        setattr(args, name, value)
    return args


def test_flags_become_settings() -> None:
    config = snip_config(
        namespace("--snip", "--snip-interval", "50", "--snip-formats", "fp8,nvfp4"), {}
    )
    assert config.enabled and config.interval == 50 and config.formats == ("fp8", "nvfp4")


def test_nothing_given_is_off() -> None:
    assert not snip_config(argparse.Namespace(), {}).enabled


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "snip.yaml"
    file.write_text("enabled: true\ninterval: 30\nefficiency_target: 0.25\n")
    words = ["--snip-config", str(file), "--snip-interval", "40"]
    config = snip_config(namespace(*words), {})
    assert (config.enabled, config.interval, config.efficiency_target) == (True, 40, 0.25)
    assert not snip_config(namespace(*words, "--no-snip"), {}).enabled


def test_the_command_lines_flags_stand_in_where_the_namespace_lost_them() -> None:
    """Megatron's --yaml-cfg makes a namespace of its own."""
    wish = read_wish(["--snip", "--snip-interval", "7", "--snip-lag", "1"])
    assert snip_config(argparse.Namespace(), wish.given).interval == 7


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--snip-efficiency-target", "2"], "--snip-efficiency-target: .*got '2'"),
        (["--snip-interval", "often"], "--snip-interval: "),
        (["--snip-interval", "2", "--snip-lag", "2"], r"^--snip-lag \(2\) must be smaller"),
        (["--snip-formats", "fp8,fp5"], "^--snip-formats: unknown format 'fp5'"),
        (["--snip-pins", "decoder"], "^--snip-pins: 'decoder' is not GLOB=OPTION"),
        (["--snip-pins", "*=fp5"], "^--snip-pins: unknown format 'fp5'"),
        (["--snip-initial-option", "fp5"], "^--snip-initial-option: "),
        (["--snip-eval-precision", "fp8"], "^--snip-eval-precision: "),
        (["--snip-config", "none.yaml"], "^--snip-config none.yaml: cannot read"),
        (["--snip-policy", "best"], "^--snip-policy: unknown policy 'best'; known: snip"),
        (["--snip-policy", "uniform-fp9"], "^--snip-policy: unknown format 'fp9'"),
    ],
)
def test_messages_name_the_flag(words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named) as error:
        snip_config(namespace("--snip", *words), {})
    assert "\n" not in str(error.value)


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "snip.yaml"
    file.write_text("intervals: 30\n")
    with pytest.raises(UsageError, match=r"--snip-config .*snip\.yaml: .*intervals"):
        snip_config(namespace("--snip-config", str(file)), {})


def test_megatrons_bf16_layers_become_pins() -> None:
    args = namespace(
        "--snip",
        "--snip-pins",
        "decoder.layers.1.*=fp8",
        first_last_layers_bf16=True,
        num_layers=4,
        num_layers_at_start_in_bf16=1,
        num_layers_at_end_in_bf16=2,
    )
    assert snip_config(args, {}).pins == (
        "decoder.layers.0.*=bf16",
        "decoder.layers.2.*=bf16",
        "decoder.layers.3.*=bf16",
        "decoder.layers.1.*=fp8",
    )


def test_overlapping_bf16_layers_are_pinned_once() -> None:
    args = namespace(
        "--snip",
        first_last_layers_bf16=True,
        num_layers=2,
        num_layers_at_start_in_bf16=2,
        num_layers_at_end_in_bf16=2,
    )
    assert snip_config(args, {}).pins == ("decoder.layers.0.*=bf16", "decoder.layers.1.*=bf16")


def test_a_wish_is_read_among_foreign_flags(tmp_path: Path) -> None:
    assert not read_wish(["--lr", "1", "--save", "x"]).enabled
    assert read_wish(["--lr", "1", "--snip", "--save", "x"]).enabled
    assert not read_wish(["--snip", "--no-snip"]).enabled
    assert not read_wish(["--snip-interval", "3"]).enabled
    wish = read_wish(["--snip", "--snip-strict-version"])
    assert wish.enabled and wish.strict_version
    file = tmp_path / "snip.yaml"
    file.write_text("enabled: true\n")
    assert read_wish(["--snip-config", str(file)]).enabled


def test_what_is_given_without_the_wish_is_forgotten() -> None:
    assert read_wish(["--lr", "1"]).forgotten == []
    assert read_wish(["--snip-interval", "3"]).forgotten == ["--snip-interval"]
    assert read_wish(["--snip-interval", "3", "--snip"]).forgotten == []
    assert read_wish(["--snip-interval", "3", "--no-snip"]).forgotten == []


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (["--snip-policy", "uniform-fp8"], []),
        (["--snip-policy", "uniform-fp8", "--snip-pipeline-balance", "none"], []),
        (["--snip-policy", "snip", "--snip-pipeline-balance", "stage"], []),
        (
            ["--snip-policy", "none", "--snip-pipeline-balance", "stage"],
            ["--snip-policy none heeds no target; without effect: --snip-pipeline-balance"],
        ),
        (
            ["--snip-policy", "uniform-fp4", "--snip-efficiency-target", "0.5"],
            ["--snip-policy uniform-fp4 heeds no target; without effect: --snip-efficiency-target"],
        ),
    ],
)
def test_settings_without_effect_are_found(words: list[str], idle: list[str]) -> None:
    assert idle_settings(snip_config(namespace("--snip", *words), {})) == idle


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("pin *.9.*=fp8: no linear's name matches", "--snip-pins"),
        ("cannot read plan file 'none.json': No such file", "--snip-plan-file"),
        ("policy 'uniform-fp3': fp3 is not among", "--snip-policy"),
        (
            "no plan satisfies: target 1; pin *=fp8; the best reachable target is 0",
            "--snip-efficiency-target, --snip-pins",
        ),
        (
            "no plan satisfies: target 0.5 in stage 1; forbidden options",
            "--snip-efficiency-target, --snip-pipeline-balance",
        ),
        ("--snip cannot run with CUDA graphs: a target 1", "--snip cannot run with CUDA graphs"),
        ("--snip-formats: unknown format 'fp5'", "--snip-formats"),
        ("out of cheese", "out of cheese"),
    ],
)
def test_later_messages_get_their_flag(message: str, named: str) -> None:
    assert naming_flags(message).partition(": ")[0] == named


def test_a_wish_that_cannot_be_read_is_taken_as_one() -> None:
    """The error is said when the settings are checked, not before Megatron has parsed."""
    assert read_wish(["--snip-config", "none.yaml"]).enabled
    assert read_wish(["--snip-interval"]).enabled
