"""One model and its data in both loops: they train, measure and plan alike.

The model, its settings and its datasets are those of Bridge's recipe. Each loop makes its own
optimizer, schedule, batches and gradients from settings of its own, which are the same. Evaluations
are left out: the loops draw other validation batches, also without SNIP.
"""

import json
from pathlib import Path
from typing import Any

from tests.bridge.lab import LAYOUTS, ON_CPU, SNIP, Lab
from tests.distributed.launch import ROOT
from tests.megatron.lab import MODEL, read_lines

SCRIPT = str(ROOT / "tests" / "bridge" / "train_in_megatron_lm.py")

FLAGS = f"""
    {MODEL} --tensor-model-parallel-size 2 --transformer-impl transformer_engine
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --min-lr 3e-5 --lr-decay-style cosine --weight-decay 0.033 --adam-beta2 0.95 --seed 1234
"""
"""What the recipe sets, as flags."""

NUMBERS = ("loss", "grad_norm", "lr", "lowest_precision_fraction")


def test_both_loops_make_the_same_plans_of_the_same_weights_and_data(
    lab: Lab, tmp_path: Path
) -> None:
    environment = {"TINY_WEIGHTS": "1"}
    bridge = lab.run("llama-tp2", SNIP, environment)
    bridge.finished()
    recipe = " ".join([*LAYOUTS["llama-tp2"], *ON_CPU.split()])
    words = ["--cpu", SCRIPT, *FLAGS.split(), *SNIP, "--snip-output-dir", str(tmp_path)]
    lab.run_words(words, {**environment, "TINY_RECIPE": recipe}).finished()

    rows = [_numbers(folder) for folder in (bridge.output, tmp_path)]
    assert rows[0] == rows[1]
    for file in ("problems/3.json", "problems/7.json", "divergences/3.json", "divergences/7.json"):
        assert _read(bridge.output / file) == _read(tmp_path / file)
    for file in ("plans/3.json", "plans/7.json"):
        plans = [_read(folder / file) for folder in (bridge.output, tmp_path)]
        for plan in plans:
            del plan["seconds"]  # of the solver
        assert plans[0] == plans[1]


def _numbers(folder: Path) -> list[dict[str, Any]]:
    """What training and SNIP compute in each iteration."""
    return [{k: row.get(k) for k in NUMBERS} for row in read_lines(folder / "metrics.jsonl")]


def _read(path: Path) -> Any:
    return json.loads(path.read_text())
