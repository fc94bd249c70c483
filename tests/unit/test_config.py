"""SnipConfig: defaults, checks, YAML and flags make one object; the schedules that it defines."""

import argparse
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.fields import FieldInfo

from megatron_snip.config import SnipConfig, make_config
from megatron_snip.errors import UsageError
from megatron_snip.files import read_yaml
from megatron_snip.flags import add_flags, flag_name, given_values
from megatron_snip.options import Option
from megatron_snip.output import yaml_text
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.run.healing import scheduled_targets
from megatron_snip.target_schedule import RAMP_STEP

OTHER: dict[str, Any] = {
    "alert": ["underflow>.3", "sqnr_db < 6"],
    "stat_decay": 0.75,
    "efficiency_target": 0.25,
    "formats": ["bf16", "fp8", "fp4"],
    "pipeline_balance": "stage",
    "target_schedule": ["0:0", "200:0.75", "9500:~0.5"],
    "heal_from": 0.96,
    "heal_below_noise": 0.5,
    "pins": ["decoder.layers.0.*=fp8", "*.linear_fc2=fp8-fp4-fp4"],
    "plugins": ["json"],
}
"""Values other than the default where `another` would break a rule."""


def from_flags(*words: str) -> SnipConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, SnipConfig, "snip-")
    return make_config(given_values(parser.parse_args(words), SnipConfig, "snip-"))


def test_an_alert_is_known_by_its_meaning_and_a_wrong_measure_gets_a_hint() -> None:
    written = "underflow>0.3", "underflow > 0.30", "underflow>3e-1,underflow>.3"
    assert {make_config({"alert": text}).alerts for text in written} == {
        (("underflow>0.3", "underflow", 1.0, 0.3),)
    }
    assert [alert[0] for alert in make_config({"alert": "amax>-0,amax>0"}).alerts] == ["amax>0"]
    for text, hint in (("undrflow>1", "underflow"), ("SQNR<9", "sqnr_db"), ("sqnr<9", "sqnr_db")):
        with pytest.raises(UsageError, match=rf"did you mean '{hint}'\?\); measures: sqnr_db, "):
            make_config({"alert": text})
    for text in ("underflow>=1", ">1", "amax", "underflow>1e999"):
        with pytest.raises(UsageError, match="MEASURE<X; measures: ") as caught:
            make_config({"alert": text})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("interval: 0100", 100),
        ("interval: 1e3", 1000),
        ("interval: 0o100", 64),
        ("interval: 0x40", 64),
        ("stat_decay: 1e-1", 0.1),
        ("target_schedule: [0:0, 200:0.75]", ("0:0", "200:0.75")),
        ("interval: 1:30", "must be a valid integer, got '1:30'"),
        ("output_dir: 2026-11-28", Path("2026-11-28")),
        ("guard: no", False),
        ("efficiency_target: yes", "efficiency_target: must be a number, got true"),
        ("interval: on", "interval: must be a number, got true"),
        ("heal_from: true", "heal_from: must be a number, got true"),
        ("interval: .inf", "interval: must be a finite number|must be a valid integer"),
        ('output_dir: "a\\0b"', "output_dir: a path cannot have a NUL in it"),
        ("efficency_target: 1", r"did you mean 'efficiency_target'\?"),
    ],
)
def test_yaml_has_the_numbers_of_yaml_1_2(text: str, value: object, tmp_path: Path) -> None:
    """Those of flags, too: 0100 is no octal number, and 0:0 is none of base 60."""
    file = tmp_path / "snip.yaml"
    file.write_text(text + "\n")
    if isinstance(value, str):
        with pytest.raises(UsageError, match=value):
            make_config(read_yaml(file))
    else:
        assert getattr(make_config(read_yaml(file)), text.partition(":")[0]) == value


@pytest.mark.parametrize(
    "text", ["1e3", "0:0", "0100", "yes", "2026-11-28", ".5", "0x1", "-", "1_0"]
)
def test_a_text_that_looks_like_a_number_is_written_so_that_it_stays_a_text(
    text: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    values = {"text": text, "number": 1e-07, "count": 100, "truth": True, "none": None}
    file.write_text(yaml_text(values))
    assert read_yaml(file) == yaml.safe_load(file.read_text()) == values


def as_words(values: dict[str, Any]) -> list[str]:
    words = []
    for name, value in values.items():
        flag = "--snip" if name == "enabled" else flag_name("snip-", name)
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, ",".join(value) if isinstance(value, list) else str(value)]
    return words


def other_values() -> list[dict[str, Any]]:
    """Settings that together have a value for every field that is not its default."""
    values = {n: OTHER.get(n, another(field)) for n, field in SnipConfig.model_fields.items()}
    heal_order = values.pop("heal_order")  # it contradicts cost and pipeline_balance
    return [values, {"granularity": "gemm", "heal_order": heal_order}]


def another(field: FieldInfo) -> Any:
    default, kind = field.default, field.annotation
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in typing.get_args(kind) if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return f"{default or ''}other"


def test_every_field_is_tried_and_has_help() -> None:
    defaults = SnipConfig()
    tried: set[str] = set()
    for values in other_values():
        config = SnipConfig(**values)
        tried |= {name for name, value in config if value != getattr(defaults, name)}
    assert tried == SnipConfig.model_fields.keys()
    assert [name for name, field in SnipConfig.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("values", other_values())
def test_yaml_flags_and_python_make_equal_objects(values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "snip.yaml"
    file.write_text(yaml.safe_dump(values))
    from_yaml = make_config(read_yaml(file))
    assert from_yaml == SnipConfig(**values) == from_flags(*as_words(values))
    assert make_config(from_yaml.model_dump(mode="json")) == from_yaml
    assert isinstance(hash(from_yaml.formats), int)  # frozen all the way


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"efficiency_target": 1.5}, "efficiency_target: .*less than or equal to 1.*got 1.5"),
        ({"efficiency_target": float("nan")}, "efficiency_target"),
        ({"calibration": "t.json"}, "calibration: .*only --snip-cost time"),
        ({"interval": "often"}, "interval: .*got 'often'"),
        ({"interval": 2, "lag": 2}, r"lag: got 2, must be below interval \(2\)"),
        ({"formats": "fp8,int8"}, "unknown format 'int8'"),
        ({"formats": ()}, "no formats given"),
        ({"formats": "bf16"}, "'bf16' leaves nothing to measure or to choose"),
        ({"formats": "bf16-bf16-bf16"}, "leaves nothing to measure"),
        ({"plan_file": ""}, "plan_file: the path is empty"),
        ({"granularity": "layer"}, "granularity: .*'linear' or 'gemm'"),
        ({"pins": "decoder.layers.0.*"}, "is not GLOB=OPTION"),
        ({"enabled": "perhaps"}, "enabled"),
        ({"interwal": 5}, "snip settings: unknown key 'interwal'"),
        ({"target_schedule": "200"}, "target_schedule: '200' is not ITERATION:TARGET"),
        ({"target_schedule": "200:1.5"}, "target_schedule: '200:1.5' is not"),
        ({"target_schedule": "5:nan"}, "target_schedule: '5:nan' is not"),
        ({"target_schedule": "9:0.5,9:0"}, "target_schedule: iteration 9 follows 9"),
        ({"target_schedule": "9007199254740993:0.5"}, r"target_schedule: .* below 2\^53"),
        ({"target_schedule": f"0:0.5,{2**53}:~0"}, r"target_schedule: .* below 2\^53"),
        ({"heal_from": 2**53 + 1}, "heal_from: must be less than"),
        ({"heal_from": "9007199254740993"}, "heal_from: must be less than"),
        ({"interval": 9007199254740993.0}, "interval: must be less than"),
        ({"start_step": "9007199254740993"}, "start_step: must be less than"),
        ({"lag": 2**53}, "lag: must be less than"),
        ({"heal_from": 0}, "heal_from: must be greater than 0, got 0"),
        ({"heal_from": 10_000}, "heal_from: got iteration 10000, must be between"),
        ({"heal_from": 0.5, "target_schedule": "7000:0"}, "heal_from: got iteration 5000, must"),
        ({"heal_order": "forward"}, "heal_order: 'forward' raises single GEMMs"),
        (
            {"heal_order": "backward", "granularity": "gemm", "cost": "time"},
            "heal_order: 'backward' counts FLOPs, and --snip-cost is time",
        ),
        ({"measure": "norms"}, "unknown key 'measure'"),
        (
            {"alert": "amax>1e4,gemm_sqnr_db < 6"},
            "alert: 'gemm_sqnr_db < 6': gemm_sqnr_db is not measured; use sqnr_db",
        ),
        (
            {"alert": "update_ratio>0.1"},
            "alert: 'update_ratio>0.1': update_ratio is not measured; use gradient_norm",
        ),
        ({"pipeline_balance": "bottleneck"}, "pipeline_balance: .*'none' or 'stage'"),
    ],
)
def test_bad_values_end_in_one_line_that_names_them(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        scheduled_targets(make_config(values), 10_000)
    assert "\n" not in str(error.value)


def test_what_follows_from_the_fields() -> None:
    config = SnipConfig(formats=("fp4", "fp8"), pins=("a.*=fp8", "b=c=fp4"))
    assert [str(option) for option in config.options] == ["fp8", "fp4"]
    assert config.lowest_format == config.lowest_formats_label == "fp4"
    several = SnipConfig(formats=("bf16", "nvfp4", "fp8", "fp4"))
    assert several.lowest_formats_label == "nvfp4/fp4"  # as many bits count alike
    assert config.pin_pairs == (("a.*", Option.uniform("fp8")), ("b=c", Option.uniform("fp4")))
    freeing = SnipConfig(formats=("fp4", "fp8"), pins=("a.*=free", "b=fp4"))
    assert freeing.pin_pairs == (("b", Option.uniform("fp4")),)
    assert freeing.free_globs == ("a.*",)


def test_the_planner_s_settings_are_the_run_s() -> None:
    common = {
        "policy": "random",
        "pipeline_balance": "stage",
        "change_penalty": 0.5,
        "cost": "time",
    }
    config = make_config(common)
    assert PlanSettings.of(config, seed=7) == PlanSettings(**common, seed=7)


def targets(iterations: list[int], **config: object) -> list[float]:
    schedule = scheduled_targets(SnipConfig(**config), 10_000)
    return [schedule.at(i) for i in iterations]


def test_targets_hold_from_their_iterations_on() -> None:
    text = "0:0,200:0.75,9000:0.5,9500:0"
    wanted = [0.0, 0.0, 0.75, 0.75, 0.5, 0.0, 0.0]
    assert targets([1, 199, 200, 8999, 9000, 9500, 10**6], target_schedule=text) == wanted
    assert targets([1, 199, 200], target_schedule="200:0.5", efficiency_target=0.25) == [
        0.25, 0.25, 0.5
    ]  # fmt: skip
    assert targets([1, 10_000]) == [0.75, 0.75]


def test_a_ramp_is_linear_to_within_half_a_step() -> None:
    found = targets(list(range(100, 501)), target_schedule="100:0.8,500:~0.1")
    assert (found[0], found[-1]) == (0.8, 0.1)
    assert len(set(found)) == 15  # fourteen plans
    for k, target in enumerate(found):
        assert abs(target - (0.8 - 0.7 * k / 400)) <= RAMP_STEP / 2 + 1e-9


def test_a_ramps_steps_are_equally_long() -> None:
    found = targets(list(range(9000, 9501)), target_schedule="0:0,200:0.75,9000:0.5,9500:~0")
    changes = [9000 + k for k in range(1, 501) if found[k] != found[k - 1]]
    assert changes == list(range(9025, 9500, 50))


def test_healing_ends_at_zero_before_the_run() -> None:
    for start in (9000.0, 0.9):
        healed = targets([8999, 9000, 9498, 9995, 10_000], heal_from=start, target_schedule="5:0.6")
        assert healed == [0.6, 0.6, 0.3, 0.0, 0.0]
    assert scheduled_targets(make_config({"heal_from": 1}), 100).heal_from == 1  # an iteration
    fraction = make_config({"heal_from": 0.07})  # 0.07 * 100 is above 7
    assert scheduled_targets(fraction, 100).heal_from == 7
