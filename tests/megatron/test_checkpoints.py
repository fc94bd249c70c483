"""Saving, being killed and resuming with Megatron's own checkpoints, in either format."""

import json
from pathlib import Path

import pytest
from megatron.core.rerun_state_machine import EXIT_CODE_RESUME_TO_DISAMBIGUATE

from tests.megatron.lab import (
    SNIP,
    Lab,
    applied_plans,
    killed,
    logged,
    read_lines,
    resumed,
    saving,
    snip_lines,
    weights,
)

TORCH_FORMAT = ("--ckpt-format", "torch")


@pytest.mark.parametrize(
    ("layout", "flags"), [("tp2", ()), ("tp2", TORCH_FORMAT), ("pp2", ()), ("dp2", ())]
)
def test_a_killed_run_resumes_bitwise(lab: Lab, layout: str, flags: tuple[str, ...]) -> None:
    """Plan, problem being solved and schedule are those of the run that was not killed."""
    uninterrupted = lab.planned(layout)
    again = resumed(lab, layout, killed(lab, layout, *flags), *flags)
    assert weights(again) == weights(uninterrupted)
    assert any("training resumes after iteration 7 with" in line for line in snip_lines(again))
    assert applied_plans(again) == [9]
    assert logged(again, "grad norm") == {
        i: norm for i, norm in logged(uninterrupted, "grad norm").items() if i > 7
    }


def test_without_a_gpu_an_asynchronous_save_is_a_plain_one(lab: Lab) -> None:
    """The process that Megatron would write the checkpoint in selects a GPU."""
    directory = lab.output("async")
    asynchronous = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
    run = lab.run("one", [*saving(directory), *asynchronous])
    assert weights(run) == weights(lab.run("one"))
    assert (directory / "latest_checkpointed_iteration.txt").read_text().strip() == "10"


def test_a_resumed_job_continues_the_files_of_the_stopped_one(lab: Lab) -> None:
    folder = killed(lab, "one", "--seed", "5")
    seen = {path.name for path in (folder / "snip" / "problems").iterdir()}
    metrics = folder / "snip" / "metrics.jsonl"
    rows = read_lines(metrics)
    assert seen == {"3.json", "7.json"} and len(rows) == 7
    resumed(lab, "one", folder, "--seed", "5", *saving(folder, at=100)).finished()
    assert read_lines(metrics)[:7] == rows
    assert [row["iteration"] for row in read_lines(metrics)] == list(range(1, 11))
    assert {path.name for path in (folder / "snip" / "problems").iterdir()} == seen


def test_a_resumed_job_leaves_the_files_of_another_run(lab: Lab) -> None:
    folder = killed(lab, "one", "--seed", "7")
    other = killed(lab, "one", "--seed", "6") / "snip"
    before = {path.relative_to(other): path.read_bytes() for path in other.rglob("*.json*")}
    again = resumed(lab, "one", folder, "--seed", "7", *saving(other.parent, at=100))
    again.finished()
    assert applied_plans(again) == [9]
    archive = other / "previous-1"
    found = {path.relative_to(archive): path.read_bytes() for path in archive.rglob("*.json*")}
    assert found == before
    assert [row["iteration"] for row in read_lines(other / "metrics.jsonl")] == [8, 9, 10]


def test_a_checkpoint_of_0_2_0_is_resumed(lab: Lab) -> None:
    """Its state of this very run, stopped after iteration 7 with a refresh in flight."""
    directory = lab.output("of 0.2.0")
    written = Path(__file__).with_name("state-0.2.0.json")
    environment = {"TINY_KILL_AFTER": "7", "TINY_STATE": str(written)}
    lab.run("one", [*SNIP, *saving(directory)], environment)
    again = resumed(lab, "one", directory)
    again.finished()
    assert any(
        "after iteration 7 with the snip plan of iteration 3" in x for x in snip_lines(again)
    )
    assert not any("other settings" in line for line in snip_lines(again))
    assert weights(again) == weights(lab.planned("one"))
    assert applied_plans(again) == [9]


@pytest.mark.parametrize("iteration", [5, 7])
def test_a_run_that_megatron_gave_up_resumes_bitwise(lab: Lab, iteration: int) -> None:
    """It begins with the iteration that Megatron doubted: a plan is applied there, or measured."""
    directory = lab.output(f"given-up-{iteration}")
    environment = {"TINY_DOUBT": str(iteration - 1), "TINY_GIVE_UP": "1"}
    # In this format Megatron forgets its doubt, which needs another machine to be settled.
    flags = (*saving(directory, at=100), *TORCH_FORMAT)
    run = lab.run("one", [*SNIP, *flags], environment)
    assert run.statuses == (EXIT_CODE_RESUME_TO_DISAMBIGUATE,), run.report
    saved = (directory / "latest_checkpointed_iteration.txt").read_text()
    assert int(saved) == iteration - 1
    again = resumed(lab, "one", directory, *TORCH_FORMAT)
    assert weights(again) == weights(lab.planned("one"))
    assert applied_plans(again) == ([5, 9] if iteration == 5 else [9])


def test_a_killed_run_with_dropout_resumes_bitwise(lab: Lab) -> None:
    """Data loaders that a resumed run starts anew do not draw from dropout's generator."""
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    uninterrupted = lab.run("one", [*SNIP, *saving(lab.output("dropout")), *dropout])
    again = resumed(lab, "one", killed(lab, "one", *dropout), *dropout)
    assert weights(again) == weights(uninterrupted)
    assert weights(again) != weights(lab.planned("one"))


@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_other_parallel_sizes_keep_the_plan(lab: Lab, layout: str) -> None:
    """Saved by two tensor-parallel ranks: linears are named alike everywhere."""
    again = resumed(lab, layout, killed(lab, "tp2"))
    again.finished()
    assert any(
        "after iteration 7 with the snip plan of iteration 3" in x for x in snip_lines(again)
    )
    assert applied_plans(again) == [9]
    runs = again, lab.planned("tp2")
    new, old = (json.loads((r.output / "plans" / "7.json").read_text()) for r in runs)
    assert new["digest"] == old["digest"]
    assert len(new["stages"]) == (2 if layout == "pp2" else 1)


FORMATS = pytest.mark.parametrize(
    ("layout", "flags"), [("tp2", ()), ("tp2", TORCH_FORMAT), ("one megatron-fsdp", ())]
)
"""Of checkpoints: torch_dist, torch and fsdp_dtensor."""


@FORMATS
def test_a_checkpoint_without_snip_starts_from_the_initial_plan(
    lab: Lab, layout: str, flags: tuple[str, ...]
) -> None:
    directory = lab.output(f"without-{layout}-{'-'.join(flags)}")
    lab.run(layout, [*saving(directory), *flags]).finished()
    again = resumed(lab, layout, directory, "--ckpt-step", "7", *flags)
    again.finished()
    assert any("the checkpoint of iteration 7 has no SNIP state" in x for x in snip_lines(again))
    assert any("starts with the uniform-bf16 plan" in x for x in snip_lines(again))


@FORMATS
def test_a_checkpoint_with_snip_loads_without(
    lab: Lab, layout: str, flags: tuple[str, ...]
) -> None:
    """With `-m megatron_snip` before the script, and in Megatron alone."""
    load = killed(lab, layout, *flags)
    again = lab.run(layout, ["--load", str(load), *flags])
    plain = lab.run(layout, ["--load", str(load), *flags], plain=True)
    assert weights(again) == weights(plain)
    assert len(logged(plain)) == 3  # iterations 8 to 10
    assert not snip_lines(again)


def test_finetuning_starts_anew(lab: Lab) -> None:
    again = resumed(lab, "tp2", killed(lab, "tp2"), "--finetune")
    assert applied_plans(again) == [5, 9], again.report


def test_a_frozen_plan_file_wins_over_the_checkpoints(lab: Lab) -> None:
    plan = lab.planned("tp2").output / "plans" / "7.json"
    flags = ("--snip-plan-file", str(plan), "--snip-collect-only")
    again = resumed(lab, "tp2", killed(lab, "tp2"), *flags)
    again.finished()
    # The same plan as that of iteration 3, which runs already.
    assert any(
        "after iteration 7 with the snip plan of iteration 3" in x for x in snip_lines(again)
    )
    assert applied_plans(again) == []
