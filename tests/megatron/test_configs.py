"""configs/ as Megatron's own parser reads them: the published models."""

import json

import pytest

from megatron_snip.cli.script import expand
from tests.distributed.launch import RANK_ENVIRONMENT
from tests.megatron.lab import CPU
from tests.processes import run_python
from tests.unit.test_configs import LAYOUTS, MODELS, argument_file

PARAMETERS = {
    "tinyllama-1.1b": 1_100_048_384,
    "open-llama-3b": 3_426_473_600,
    "open-llama-7b": 6_738_415_616,
    "llama-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
}
"""Of the published models."""


@pytest.fixture(scope="module")
def parameters() -> dict[str, int]:
    """Parameters of the model that Megatron builds of every case."""
    cases = {}
    for model, layout in LAYOUTS:
        files = (argument_file("models", model), argument_file("parallel", layout))
        gpus = MODELS[model][2][layout]
        words = [*expand(files), *CPU.split()]
        cases[f"{model}, {layout}"] = {"words": words, "world_size": gpus}
    words = ["-m", "tests.megatron.read_arguments"]
    done = run_python(*words, stdin=json.dumps(cases), timeout=200, **RANK_ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, int] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_megatron_builds_the_published_model(
    parameters: dict[str, int], model: str, layout: str
) -> None:
    assert parameters[f"{model}, {layout}"] == PARAMETERS[model]
