"""A user's first mistakes end in one line, on every rank, before a model is built."""

import pytest

from tests.bridge.lab import SCRIPT, SNIP, Lab

MISTAKES = {
    "flags and a callback": (
        ["--snip"],
        {"TINY_CALLBACK": "{}"},
        "settings come from --snip flags and from a SnipCallback; drop the flags, or run the "
        "script without the callback",
    ),
    "a callback without settings": (
        [],
        {"TINY_CALLBACK": "null"},
        "SnipCallback needs settings, and got nothing; write SnipCallback(SnipConfig(",
    ),
    "a setting of Bridge's": (
        ["--snip", "dist.use_decentralized_pg=true", "dist.use_gloo_process_groups=false"],
        {},
        "--snip cannot run with dist.use_decentralized_pg (Megatron-Bridge): ",
    ),
    "distillation": (["--snip"], {"TINY_TEACHER": "1"}, "--snip cannot run with distillation "),
    "a pin of no linear": (
        ["--snip", "--snip-backend", "simulate", "--snip-pins", "decoder.layers.9.*=bf16"],
        {},
        "decoder.layers.9.*",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_line(lab: Lab, mistake: str) -> None:
    words, environment, text = MISTAKES[mistake]
    run = lab.run_words(["--cpu", SCRIPT, "llama", *words], environment)
    assert run.statuses == (2, 2), run.report
    errors = [x for x in run.logs[0].splitlines() if x.startswith("megatron-snip: error: ")]
    assert len(errors) == 1 and text in errors[0], run.report
    assert "Traceback" not in run.report
    assert run.logs[0].splitlines()[-1] == errors[0], run.report


def test_a_rank_without_snip_ends_the_job_with_a_line_that_names_it(lab: Lab) -> None:
    run = lab.run("llama-tp2", SNIP, {"TINY_WITHOUT_SNIP": "1"})
    assert run.statuses[0] == 2, run.report
    line = "--snip is missing on rank 1; start all ranks with the same flags and files"
    assert run.logs[0].count(line) == 1 and "Traceback" not in run.logs[0], run.report
