"""From flags in Megatron's parser to a controller; bad input is one line and status 2."""

import argparse
import importlib
import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.directory import MARKER
from megatron_snip.errors import SnipError, UsageError
from megatron_snip.linears.te import machine as machine_module
from megatron_snip.linears.te.machine import Machine
from megatron_snip.linears.te.modules import EXTENSION
from megatron_snip.linears.te.recipe_table import JobPrecision
from megatron_snip.patches import cpu, megatron_lm
from megatron_snip.patches.arguments import exit_on_error, read_cli_args, snip_config
from megatron_snip.patches.attach import make_writers
from megatron_snip.patches.registry import Registry
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.events import Event, Metrics, PlanApplied
from megatron_snip.run.state import RunState
from megatron_snip.topology import Topology
from tests.unit.planning.build import plan_of

# As Transformer Engine's own check says there, also of a job that asks for it.
NO_FP8 = {"tensorwise_hybrid": "FP8 needs compute capability 8.9"}
A100 = Machine((8, 0), te_version="2.20", te_unavailable=NO_FP8)
HOPPER = Machine((9, 0), te_version="2.20")


@pytest.mark.parametrize(
    ("machine", "words", "text"),
    [
        (A100, (), "Transformer Engine runs only bf16 on compute capability 8.0"),
        (HOPPER, ("--snip-pins", "*=fp4"), "fp4 is neither bf16 nor an option of formats bf16,fp8"),
        (A100, ("--snip-backend", "simulate", "--snip-pins", "*=fp3"), "formats fp8,fp4 by linear"),
    ],
)
@pytest.mark.parametrize("job", [{}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}])
def test_what_the_machine_cannot_run_is_refused_before_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    words: tuple[str, ...],
    text: str,
    job: dict[str, str],
) -> None:
    """In a BF16 job and in an FP8 job, where `auto` depends on the job's recipe."""

    def this_machine(with_te: bool, config: Any) -> Machine:
        return replace(machine, job=JobPrecision.of(config))

    monkeypatch.setattr(machine_module, "this_machine", this_machine)
    monkeypatch.setattr(importlib.import_module(EXTENSION), "HAVE_TE", True)
    job = {**job, "transformer_impl": "transformer_engine"}
    with pytest.raises(SnipError, match=text):
        config_of(*words, **job)
    local = config_of("--snip-backend", "simulate", **job)
    assert local.formats == ("auto",)


@pytest.fixture
def parser(fake: Any) -> Any:
    """Megatron's parser with SNIP's flags."""
    Registry([megatron_lm.arguments]).install({"always"})
    return fake.arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def test_the_namespace_is_megatrons_unless_flags_are_given(parser: Any) -> None:
    plain = {"lr": 0.1, "distributed_backend": "nccl"}
    assert vars(parser.parse_args([])) == plain
    given = vars(parser.parse_args(["--snip", "--snip-plan-file", "plan.json"]))
    assert given == {**plain, "snip_enabled": True, "snip_plan_file": "plan.json"}


def test_help_works_despite_a_stray_percent_sign_of_megatrons(parser: Any) -> None:
    text = parser.format_help()
    assert "50% of what it was" in text and "--snip-efficiency-target" in text


def test_a_cpu_run_has_defaults_that_flags_override(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(cpu, "is_installed", lambda: True)
    parser = request.getfixturevalue("parser")
    assert vars(parser.parse_args([])) == {"lr": 0.1, "distributed_backend": "gloo"}
    assert parser.parse_args(["--distributed-backend", "nccl"]).distributed_backend == "nccl"


def config_of(*words: str, **megatron: Any) -> SnipConfig:
    """The settings on a command line; Megatron's --yaml-cfg makes a namespace of its own."""
    line = read_cli_args(["--snipe-hunt", "--lr", "1", "--snip", *words])
    assert line.enabled and line.others == ["--snipe-hunt", "--lr", "1"]
    return snip_config(argparse.Namespace(**megatron), line.given)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--snip-efficiency-target 2", "--snip-efficiency-target: .*got '2'"),
        ("--snip-interval 2 --snip-lag 2", "--snip-lag: got 2, must be below"),
        ("--snip-formats fp8,fpp4", "--snip-formats: unknown format 'fpp4'.*mean 'fp4'"),
        ("--snip-eval-precision bf1", "--snip-eval-precision: .*did you mean 'bf16'"),
        ("--snip-config none.yaml", "--snip-config: 'none.yaml': cannot read"),
        ("--snip-policy snp", "--snip-policy: unknown policy 'snp'.*did you mean 'snip'"),
        ("--snip-intervall 3", r"unknown flag --snip-intervall \(did you mean '--snip-interval'"),
        ("--snip-zzzzzzzzzzz=3", "unknown flag --snip-zzzzzzzzzzz; --help lists the flags"),
        ("--snip-plan", r"unknown flag --snip-plan \(did you mean '--snip-plan-file'\?\)"),
        ("--no-snip-frezze", "unknown flag --no-snip-frezze"),
        ("--snip-interval", "argument --snip-interval: expected one argument"),
    ],
)
def test_bad_flags_and_values_end_in_one_line_that_names_the_flag(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        exit_on_error(lambda: config_of(*words.split()))
    assert end.value.code == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert re.match(f"megatron-snip: error: {line}", printed)


@pytest.mark.parametrize("is_new_program", [False, True])
def test_paths_are_those_of_the_directory_in_which_the_job_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new_program: bool
) -> None:
    """run_recipe.py of Megatron-Bridge 0.6 changes it, and then may start itself anew."""
    start = tmp_path / "start"
    other = tmp_path / "other"
    start.mkdir()
    other.mkdir()
    text = "interval: 9\nplan_file: plans/1.json\nreference: bf16\noutput_dir: here\n"
    (start / "snip.yaml").write_text(text)
    monkeypatch.chdir(start)
    words = ["--snip", "--snip-config", "snip.yaml", "--lr", "1", "--snip-output-dir", "out"]
    line = read_cli_args(words)
    monkeypatch.chdir(other)
    if is_new_program:
        line = read_cli_args(["--lr", "1", *line.flags])
    assert line.others == ["--lr", "1"]
    (start / "snip.yaml").unlink()  # it is read once
    config = snip_config(Namespace(), line.given)
    assert config.interval == 9
    assert config.plan_file == start / "plans" / "1.json"
    assert config.reference == start / "bf16"
    assert config.output_dir == start / "out"


@pytest.mark.parametrize(("text", "enabled"), [('"false"', False), ("no", False), ('"on"', True)])
def test_a_file_turns_snip_on_in_any_spelling(tmp_path: Path, text: str, enabled: bool) -> None:
    file = tmp_path / "snip.yaml"
    file.write_text(f"enabled: {text}\n")
    line = read_cli_args(["--snip-config", str(file)])
    assert line.enabled == snip_config(Namespace(), line.given).enabled == enabled


def test_other_words_are_as_they_were_given() -> None:
    paths = ["--snip-output-dir", "~/out", "--snip-reference=/bf16", "--snip-calibration", "auto"]
    line = read_cli_args(["--snip", *paths])
    assert line.flags == ["--snip", *paths]
    assert line.given["output_dir"] == "~/out"
    config = snip_config(Namespace(), line.given)
    assert (config.output_dir, config.calibration) == (Path.home() / "out", "auto")
    with pytest.raises(UsageError, match="the path is empty"):
        config_of("--snip-output-dir", "")


@pytest.fixture
def attached(fake: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(megatron_lm, "attach", lambda *args: calls.append(args))
    Registry([megatron_lm.validation, megatron_lm.model_setup]).install({"always", "--snip"})
    return calls


def test_a_controller_is_attached_to_what_megatron_built(fake: Any, attached: list[Any]) -> None:
    assert fake.arguments.validate_args(fake.args, {}) is fake.args
    fake.training.setup_model_and_optimizer("gpt")
    assert attached == []  # without --snip
    fake.args.snip_enabled = True
    fake.arguments.validate_args(fake.args, {})
    fake.calls.clear()
    result = fake.training.setup_model_and_optimizer("gpt", cfg_container="container")
    assert result == (["model"], "optimizer", "scheduler")
    assert fake.calls == [("setup", ("gpt",), {"cfg_container": "container"})]
    ((_, config, _, model, optimizer, *_),) = attached
    assert config.enabled and model == ["model"] and optimizer == "optimizer"


def test_without_a_gpu_no_save_is_asynchronous(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Registry([megatron_lm.validation]).install({"always"})
    fake.args.async_save = True
    fake.arguments.validate_args(fake.args, {})
    assert fake.args.async_save
    monkeypatch.setattr(cpu, "is_installed", lambda: True)
    fake.arguments.validate_args(fake.args, {})
    assert not fake.args.async_save


def test_a_flag_that_the_script_gives_itself_comes_too_late(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Registry([megatron_lm.validation, megatron_lm.model_setup]).install({"always"})
    fake.arguments.validate_args(fake.args, {})
    fake.args.snip_enabled = True
    with pytest.raises(SystemExit):
        fake.arguments.validate_args(fake.args, {})
    assert "error: --snip: the script gave this flag itself" in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"snip_interval": "often"}, "--snip-interval: "),
        ({"hybrid_context_parallel": True}, "--snip cannot run with --hybrid-context-parallel"),
    ],
)
def test_bad_input_ends_once_per_host_before_the_model_is_built(
    fake: Any,
    attached: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    setting: dict[str, Any],
    named: str,
    rank: str,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    vars(fake.args).update(snip_enabled=True, **setting)
    for call in (
        lambda: fake.arguments.validate_args(args=fake.args),
        lambda: fake.training.setup_model_and_optimizer("gpt"),
    ):
        with pytest.raises(SystemExit) as end:
            call()
        assert end.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (rank == "0")
        assert all(line.startswith(f"megatron-snip: error: {named}") for line in lines)
    assert [name for name, *_ in fake.calls] == ["validate"]  # Megatron validates first
    assert attached == []


def test_an_output_directory_that_cannot_be_used_is_named_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="not the marker") as caught:
        make_writers(SnipConfig(output_dir=tmp_path), Namespace(), Topology(), dict)
    assert caught.value.field == "output_dir"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


class Job:
    """Megatron jobs in one process that use one output directory, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, state: RunState | None, *plans: tuple[int, PrecisionPlan]) -> str:
        """Start, apply plans, end; return the run's identity."""
        config = SnipConfig(output_dir=self.folder)
        args = Namespace(iteration=0 if state is None else state.iteration)
        (files,), identity = make_writers(config, args, Topology(), dict, state)
        for iteration, plan in plans:
            files.write(Event(iteration, PlanApplied(plan, {}, 1, 0.0)))
            files.write(Event(iteration, Metrics({"loss": 2.0})))
        files.close()
        return identity

    @property
    def iterations(self) -> list[int]:
        """Of the rows in metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def checkpoint(identity: str, iteration: int, *plans: tuple[int, PrecisionPlan]) -> RunState:
    history = tuple((at, plan.digest) for at, plan in plans)
    return RunState(iteration, plan_of(["fp4"]), run_id=identity, history=history)


def test_a_resumed_run_continues_its_own_directory_and_archives_that_of_another(
    tmp_path: Path,
) -> None:
    """In Megatron a resume with --load A --snip-output-dir B took over the files of B's run."""
    a, b = Job(tmp_path / "a"), Job(tmp_path / "b")
    plan = (3, plan_of(["fp4"], iteration=2))
    of_a, of_b = a.run(None, plan), b.run(None, plan)
    assert len({of_a, of_b, ""}) == 3
    assert a.run(checkpoint(of_a, 3, plan), (4, plan[1])) == of_a
    assert a.iterations == [3, 4] and not (a.folder / "previous-1").exists()
    settings = (b.folder / "config.yaml").read_bytes()
    branch = b.run(checkpoint(of_a, 3, plan), (4, plan[1]))
    assert b.iterations == [4]
    assert (b.folder / "previous-1" / "config.yaml").read_bytes() == settings
    # The branch is a run of its own: its checkpoints do not continue in A, nor A's in B.
    assert branch not in (of_a, of_b)
    a.run(checkpoint(branch, 4, plan), (5, plan[1]))
    assert a.iterations == [5] and (a.folder / "previous-1" / "metrics.jsonl").exists()
    # A checkpoint without SNIP's state is of no run of SNIP's.
    args = Namespace(iteration=7)
    (files,), _ = make_writers(SnipConfig(output_dir=b.folder), args, Topology(), dict)
    files.close()
    assert b.iterations == [] and (b.folder / "previous-2" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("is_own", "marker", "continues"),
    [(True, "0123\n", True), (True, "", True), (False, "0123\n", False), (False, "", False)],
)
def test_a_checkpoint_without_an_identity_belongs_to_the_directory_that_records_its_plans(
    tmp_path: Path, is_own: bool, marker: str, continues: bool
) -> None:
    """Those of release 0.2.0."""
    job = Job(tmp_path)
    plans = [(3, plan_of(["fp4"], iteration=2)), (5, plan_of(["fp8"], iteration=4))]
    job.run(None, *plans)
    (tmp_path / MARKER).write_text(marker)
    if not is_own:
        plans[0] = (3, plans[1][1])
    identity = job.run(checkpoint("", 5, *plans))
    assert (job.iterations == [3, 5]) == continues
    assert identity and (identity == "0123") == (continues and marker != "")
    # Before its first plan a checkpoint shows no run.
    job.run(checkpoint("", 1))
    assert job.iterations == []


def test_a_dashboard_that_fails_at_the_start_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board, wandb = Mock(), Mock()
    wandb.config.update.side_effect = ConnectionError("the service is gone")
    config = SnipConfig(output_dir=tmp_path / "snip")
    writers, _ = make_writers(
        config, Namespace(), Topology(), lambda: {"TensorBoard": board, "W&B": wandb}
    )
    assert not wandb.init.called  # the run is Megatron's, also after a resume
    assert [type(writer).__name__ for writer in writers] == ["RunDirectory", "TensorBoardWriter"]
    assert "without the writer 'W&B': ConnectionError: the service is gone" in caplog.text
    for writer in writers:
        writer.close()
