"""Preflight of a job of Megatron-Bridge says what the job then does."""

import json
from typing import Any

import pytest
import yaml

from tests.bridge.lab import LAYOUTS, OF_JOB, SCRIPT, Lab, of_job
from tests.bridge.train_recipe import SHRUNK
from tests.distributed.launch import Run
from tests.megatron.lab import runnable, snip_lines

RECIPE = "llama32_1b_pretrain_config"
"""What the script calls `llama`."""
SNIP = ["--snip", "--snip-interval", "4", "--snip-start-step", "3", "--snip-lag", "2"]
PLANS = [*OF_JOB, *SNIP, "--snip-efficiency-target", "0.25"]
JOBS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "in BF16": ("llama-pp2", [*SNIP, "train.train_iters=4"], {}),
    "with experts": ("moe-ep2", [*SNIP, "train.train_iters=4"], {}),
    "in FP8 with BF16 layers": ("llama-tp2", PLANS, of_job()),
}
"""Layout, words, environment."""


def preflight(
    lab: Lab, words: list[str], environment: dict[str, str] | None = None
) -> tuple[Run, dict[str, Any]]:
    head = ["preflight", "--json", "--gpus", "2", "--capability", "10.0"]
    run = lab.run_words([*head, *words], environment, ranks=1)
    text = run.logs[0]
    return run, json.loads(text[text.index("{") : text.rindex("}") + 1]) if "{" in text else {}


@pytest.mark.parametrize("name", JOBS)
def test_it_says_what_the_job_then_does(lab: Lab, name: str) -> None:
    layout, words, environment = JOBS[name]
    run, found = preflight(lab, [SCRIPT, *LAYOUTS[layout], *words], environment)
    assert run.statuses == (0,) and found["refused"] == [], run.report
    assert "ERROR" not in run.logs[0] and "Traceback" not in run.logs[0]
    job = lab.run(layout, words, environment)
    job.finished()
    lines = "\n".join(snip_lines(job))
    assert f"snip: plans {found['linears']['all']} linears" in lines
    assert f"formats auto: {','.join(found['formats'])} (backend {found['backend']})" in lines
    for source, row in found["fixed"].items():
        assert f"{row['linears']} by {source} (such as {row['example']})" in lines
    settings = yaml.safe_load((job.output / "config.yaml").read_text())
    assert settings["snip"]["formats"] == found["formats"]
    problem = json.loads((job.output / "problems" / "3.json").read_text())
    for key in ("pins", "ties", "stage_layers", "target"):
        assert found["problem"].get(key) == problem.get(key), key
    assert runnable(found["problem"]) == runnable(problem)


def test_a_recipe_s_name_stands_for_its_script(lab: Lab) -> None:
    layout, words, _ = JOBS["in BF16"]
    overrides = [*SHRUNK.split(), *LAYOUTS[layout][1:]]
    by_name = preflight(lab, [RECIPE, *overrides, *words])
    by_script = preflight(lab, [SCRIPT, *LAYOUTS[layout], *words])
    assert by_name[0].statuses == by_script[0].statuses == (0,), by_name[0].report
    assert by_name[1] == by_script[1]


def test_what_the_job_refuses_is_refused(lab: Lab) -> None:
    words = ["--snip", "dist.use_decentralized_pg=true", "dist.use_gloo_process_groups=false"]
    run, found = preflight(lab, [SCRIPT, "llama", *words])
    assert run.statuses == (2,) and len(found["refused"]) == 1, run.report
    assert "cannot run with dist.use_decentralized_pg (Megatron-Bridge): " in found["refused"][0]
    run, found = preflight(lab, ["llama32_1b_pretrain_confg"])
    assert run.statuses == (2,) and not found
    assert f"did you mean '{RECIPE}'?" in run.logs[0]
