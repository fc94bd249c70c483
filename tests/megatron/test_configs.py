"""configs/ as Megatron's own parser reads them: the published models."""

import json
from typing import Any

import pytest

from megatron_snip.cli.script import expand
from tests.distributed.launch import RANK_ENVIRONMENT
from tests.megatron.lab import CPU
from tests.processes import ROOT, run_python

PARAMETERS = {
    "tinyllama-1.1b": 1_100_048_384,
    "open-llama-3b": 3_426_473_600,
    "open-llama-7b": 6_738_415_616,
    "llama-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
}
"""Of the published models."""

CASES = {
    "tinyllama-1.1b": ("tinyllama-1.1b", "data", 8),
    "open-llama-3b": ("open-llama-3b", "data", 8),
    "open-llama-7b": ("open-llama-7b", "data", 8),
    "llama-70b, 8": ("llama-70b", "llama-70b-8gpus", 8),
    "llama-70b, 64": ("llama-70b", "llama-70b-64gpus", 64),
    "mixtral-8x7b": ("mixtral-8x7b", "mixtral-8x7b-8gpus", 8),
}
"""Model, parallel sizes, GPUs."""


def files(model: str, parallel: str) -> list[str]:
    folder = ROOT / "configs"
    return [f"@{folder}/models/{model}.args", f"@{folder}/parallel/{parallel}.args"]


@pytest.fixture(scope="module")
def parameters() -> dict[str, int]:
    """Parameters of the model that Megatron builds of every case."""
    cases: dict[str, Any] = {
        name: {"words": [*expand(files(model, parallel)), *CPU.split()], "world_size": gpus}
        for name, (model, parallel, gpus) in CASES.items()
    }
    words = ["-m", "tests.megatron.read_arguments"]
    done = run_python(*words, stdin=json.dumps(cases), timeout=200, **RANK_ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, int] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("name", CASES)
def test_megatron_builds_the_published_model(parameters: dict[str, int], name: str) -> None:
    assert parameters[name] == PARAMETERS[CASES[name][0]]
