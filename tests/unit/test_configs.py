"""Every file in configs/ loads and is the model that was published."""

import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_snip.cli.script import expand
from megatron_snip.config import SnipConfig, make_config
from megatron_snip.files import read_yaml
from megatron_snip.trainer.config import make_train_config
from megatron_snip.trainer.session import check_run
from tests.published_models import FOLDER, LAYOUTS, MODELS

FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
RUNS = sorted(FOLDER.glob("*.yaml"))
INTENTS = sorted(path.stem for path in (FOLDER / "snip").iterdir())
KINDS = ("tensor", "pipeline")


# ---- files ------------------------------------------------------------------------------------


def test_every_file_is_looked_at() -> None:
    yaml = {*(path.name for path in RUNS), *(f"snip/{name}.yaml" for name in INTENTS)}
    layouts = {layout for _, layout in LAYOUTS}
    arguments = {f"models/{name}.args" for name in (*MODELS, "tiny")}
    arguments |= {f"parallel/{name}.args" for name in layouts}
    rules = {"precision/nemotron-3-super.yaml"}  # tests/unit/cli/test_score.py
    assert {str(path.relative_to(FOLDER)) for path in FILES} == yaml | arguments | rules


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_loads(path: Path) -> None:
    config = make_train_config({**read_yaml(path), "run_dir": "runs/never-made"})
    check_run(config, config.model_parallel_size)


@cache
def intent(name: str) -> SnipConfig:
    return make_config(read_yaml(FOLDER / "snip" / f"{name}.yaml"))


def test_intents_go_from_careful_to_bold() -> None:
    assert INTENTS == ["aggressive", "balanced", "collect-only", "conservative"]
    careful, middle, bold = map(intent, ("conservative", "balanced", "aggressive"))
    assert careful.efficiency_target < middle.efficiency_target < bold.efficiency_target
    assert careful.interval > middle.interval > bold.interval
    assert careful.start_step > middle.start_step > bold.start_step
    assert all(config.enabled for config in (careful, middle, bold))
    watching = intent("collect-only")
    assert watching.enabled and watching.collect_only


# ---- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_model_has_the_published_heads_and_fits_its_gpus(name: str, layout: str) -> None:
    """Its number of parameters is compared in tests/megatron/test_configs.py, by Megatron."""
    heads, active, gpus = MODELS[name]
    files = [f"@{FOLDER}/models/{name}.args", f"@{FOLDER}/parallel/{layout}.args"]
    sizes = {flag[2:]: int(word) for flag, word in pairwise(expand(files)) if word.isdigit()}
    assert (sizes["num-attention-heads"], sizes.get("moe-router-topk", 1)) == (heads, active)
    vocabulary = sizes["vocab-size"] + 1  # NullTokenizer adds the end of document
    assert vocabulary % sizes.get("make-vocab-size-divisible-by", 1) == 0
    replica = math.prod(sizes.get(f"{kind}-model-parallel-size", 1) for kind in KINDS)
    assert gpus[layout] % replica == 0
