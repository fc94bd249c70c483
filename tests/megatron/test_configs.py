"""configs/ as Megatron's own parser reads them: the published models."""

import pytest

from megatron_snip.cli.script import expand
from tests.distributed.launch import ROOT
from tests.megatron.lab import CPU, Lab
from tests.published_models import FOLDER, LAYOUTS, MODELS

SCRIPT = str(ROOT / "tests" / "megatron" / "read_arguments.py")
PARAMETERS = {
    "tinyllama-1.1b": 1_100_048_384,
    "open-llama-3b": 3_426_473_600,
    "open-llama-7b": 6_738_415_616,
    "llama-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
}
"""Of the published models."""


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_megatron_builds_the_published_model(lab: Lab, model: str, layout: str) -> None:
    files = (f"@{FOLDER}/models/{model}.args", f"@{FOLDER}/parallel/{layout}.args")
    words = [SCRIPT, *expand(files), *CPU.split()]
    run = lab.run_words(1, words, {"GPUS": str(MODELS[model][2][layout])}, plain=True)
    assert run.finished() == [{"parameters": PARAMETERS[model]}]
