import json

import pytest

from megatron_snip.config import make_config
from megatron_snip.errors import UsageError
from megatron_snip.planning.settings import PlanSettings


def test_the_settings_of_a_run_contain_the_planner_s() -> None:
    config = make_config(
        {
            "policy": "greedy",
            "efficiency_target": 0.6,
            "pipeline_balance": "stage",
            "pins": "decoder.layers.0.*=fp8,*.linear_fc2=fp8-fp8-fp8",
            "change_penalty": 0.1,
        }
    )
    settings = PlanSettings.from_config(config, seed=7)
    assert settings.policy == "greedy"
    assert settings.target == 0.6
    assert settings.pipeline_balance == "stage"
    assert settings.pins == (("decoder.layers.0.*", "fp8"), ("*.linear_fc2", "fp8"))
    assert (settings.change_penalty, settings.seed) == (0.1, 7)


def test_settings_travel_as_json() -> None:
    settings = PlanSettings(
        pins=(("*", "fp8"),), first_layers=(2, "bf16"), change_penalty=0.1, cost="time", target=0.5
    )
    text = json.dumps(settings.to_dict())
    assert PlanSettings.from_dict(json.loads(text)) == settings


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"target": 1.1}, "target"),
        ({"target": "nan"}, "target"),
        ({"pipeline_balance": "some"}, "pipeline_balance"),
        ({"change_penalty": -1}, "change_penalty"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"workers": 0}, "workers"),
        ({"seed": 2**31}, "seed"),
        ({"first_layers": ("x", "fp8")}, "first_layers"),
        ({"cost": "watts"}, "cost"),
        ({"polcy": "snip"}, "unknown key 'polcy'"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        PlanSettings.from_dict(values)
    assert "\n" not in str(caught.value)
