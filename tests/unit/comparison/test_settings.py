"""A comparison's settings: YAML and flags make one checked object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_snip.comparison.schedule import make_schedule
from megatron_snip.comparison.settings import load_comparison, make_comparison
from megatron_snip.comparison.store import Store
from megatron_snip.errors import UsageError
from megatron_snip.trainer.checks import check_run

CONFIGS = Path(__file__).parents[3] / "configs"


def test_flags_win_over_the_file_and_lists_are_comma_separated(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("seeds: 5\nlowest: [fp4]\ntrain: {num_layers: 2}\n")
    config = load_comparison(file, {"lowest": "fp3,fp4", "targets": "0.5, 0.75"})
    assert config.seeds == 5
    assert config.lowest == ("fp3", "fp4")
    assert config.targets == (0.5, 0.75)
    assert config.train_config().num_layers == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 3}, "unknown key 'seed'"),
        ({"targets": [1.5]}, "targets"),
        ({"modes": ["forward"]}, "modes"),
        ({"lowest": ["fp5"]}, "unknown format 'fp5'"),
        ({"policies": ["random"]}, "must hold 'bf16'"),
        ({"policies": ["bf16", "best"]}, "unknown contender 'best'"),
        ({"train": {"run_dir": "x"}}, "train.run_dir is set by the comparison itself"),
        ({"train": {"hidden_sise": 64}}, "hidden_sise"),
        ({"contenders": {"mine": {"seed": 1}}}, "sets 'seed'"),
        ({"forks": {"steps": 0}}, "forks.steps"),
        ({"forks": {"cooldown": True}}, "cooldown needs train.lr_decay_style constant, got cosine"),
    ],
)
def test_bad_settings_are_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        make_comparison(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("compare*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_comparison_can_start(path: Path, tmp_path: Path) -> None:
    schedule = make_schedule(load_comparison(path, {"output": tmp_path}))
    for run in schedule.runs:
        config = Store(tmp_path).config_of(run)
        # What the run finds when it starts is not there yet: its checkpoint and its plan.
        snip = config.snip.model_copy(update={"plan_file": None})
        alone = {"load": None, "ckpt_step": None, "save": None, "snip": snip}
        check_run(config.model_copy(update=alone), world_size=1)
