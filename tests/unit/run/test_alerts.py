"""Alerts of health: each linear once, and a line that stays short."""

from types import SimpleNamespace
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.run.alerts import new_alerts


class Found(SimpleNamespace):
    def __str__(self) -> str:
        return f"{self.linear} 0.5"


def health(names: list[str]) -> Any:
    return SimpleNamespace(beyond=lambda *_: [Found(linear=name) for name in names])


def test_a_line_names_six_linears_and_each_of_all_once() -> None:
    thresholds = SnipConfig(alert=("underflow>0.3",)).alerts
    names = [f"decoder.layers.{number}.mlp.linear_fc1" for number in range(100)]
    line, reported = new_alerts(thresholds, health(names), ())
    assert line is not None and line.endswith("and 94 more") and line.count("linear_fc1") == 6
    assert new_alerts(thresholds, health(names), reported) == (None, reported)
    more = health([*names, "decoder.layers.7.mlp.linear_fc2"])
    line, after = new_alerts(thresholds, more, reported)
    assert line == "alert underflow>0.3: decoder.layers.7.mlp.linear_fc2 0.5"
    assert len(after) == 101 and set(reported) < set(after)
