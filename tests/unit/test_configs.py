"""Every file in configs/ loads and is the model that was published."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megatron_snip.cli.script import expand
from megatron_snip.config import SnipConfig, make_config
from megatron_snip.files import read_yaml
from megatron_snip.trainer.config import make_train_config
from megatron_snip.trainer.session import check_run

FOLDER = Path(__file__).parents[2] / "configs"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
RUNS = sorted(FOLDER.glob("*.yaml"))
INTENTS = sorted(path.stem for path in (FOLDER / "snip").iterdir())


@dataclass(frozen=True)
class Published:
    """A model as its authors describe it; its other sizes decide the number of parameters.

    Attributes:
        parameters: of the published weights.
        heads: of attention.
        parallel: files of parallel sizes, and GPUs.
        active: of a mixture's experts.
    """

    parameters: int
    heads: int
    parallel: dict[str, int]
    active: int = 1


DATA = {"data": 8}
MODELS = {
    "tinyllama-1.1b": Published(1_100_048_384, 32, DATA),
    "open-llama-3b": Published(3_426_473_600, 32, DATA),
    "open-llama-7b": Published(6_738_415_616, 32, DATA),
    "llama-70b": Published(70_553_706_496, 64, {"llama-70b-8gpus": 8, "llama-70b-64gpus": 64}),
    "mixtral-8x7b": Published(46_702_792_704, 32, {"mixtral-8x7b-8gpus": 8}, active=2),
}
LAYOUTS = [(name, layout) for name, model in MODELS.items() for layout in model.parallel]


def argument_file(folder: str, name: str) -> str:
    return f"@{FOLDER / folder / name}.args"


def flags(*files: str) -> dict[str, str]:
    """Return {flag: value} of argument files; a flag without a value has an empty one."""
    found: dict[str, str] = {}
    for word in expand(files):
        if word.startswith("--"):
            found[word[2:]] = ""
        else:
            found[list(found)[-1]] = word
    return found


# ---- files ------------------------------------------------------------------------------------


def test_every_file_is_looked_at() -> None:
    yaml = {
        *(path.name for path in RUNS),
        *(f"snip/{name}.yaml" for name in INTENTS),
    }
    layouts = {layout for model in MODELS.values() for layout in model.parallel}
    arguments = {f"models/{name}.args" for name in MODELS}
    arguments |= {f"parallel/{name}.args" for name in layouts}
    assert {str(path.relative_to(FOLDER)) for path in FILES} == yaml | arguments


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
def test_a_model_is_the_published_one(name: str, layout: str) -> None:
    """Megatron's own count of parameters is compared in tests/megatron/test_configs.py."""
    model, gpus = MODELS[name], MODELS[name].parallel[layout]
    read = flags(argument_file("models", name), argument_file("parallel", layout))
    sizes = {key: int(value) for key, value in read.items() if value.isdigit()}
    vocabulary = sizes["vocab-size"] + 1  # NullTokenizer adds the end of document
    experts, heads = sizes.get("num-experts", 1), sizes["num-attention-heads"]
    assert (heads, sizes.get("moe-router-topk", 1)) == (model.heads, model.active)
    assert vocabulary % sizes.get("make-vocab-size-divisible-by", 1) == 0
    replica = math.prod(
        sizes.get(f"{kind}-model-parallel-size", 1) for kind in ("tensor", "pipeline")
    )
    assert gpus % replica == 0
    hidden, groups = sizes["hidden-size"], sizes.get("num-query-groups", heads)
    attention = 2 * hidden**2 + 2 * hidden**2 * groups // heads
    mlp = experts * 3 * hidden * sizes["ffn-hidden-size"] + (hidden * experts if experts > 1 else 0)
    layer = attention + mlp + 2 * hidden
    total = sizes["num-layers"] * layer + 2 * vocabulary * hidden + hidden
    assert total == model.parameters
