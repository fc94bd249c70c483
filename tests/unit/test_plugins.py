"""Users of a wheel add policies, formats and writers by a module of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.cli.commands import split_plugins
from megatron_snip.config import make_config
from megatron_snip.directory import mark
from megatron_snip.errors import UsageError
from megatron_snip.planning import solver_process
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import write_problem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.planning.solver_process import worker_command, worker_environment
from megatron_snip.plugins import load_plugins
from megatron_snip.reporting.run_record import read_run
from megatron_snip.reporting.writers import added_writers
from tests.processes import run_copy
from tests.unit.planning.build import problem_of
from tests.unit.reporting.runs import Shape, config, write_run

PLUGIN = """
from dataclasses import replace
from pathlib import Path
from megatron_snip.formats import E2M1, FORMATS, Format
from megatron_snip.planning.policies import POLICIES, Policy, lowered_in
from megatron_snip.reporting.writers import WRITERS

FORMATS["fp4_64"] = Format("fp4_64", 4, E2M1, 64, (64, 64))
order = lowered_in(lambda request, task: list(range(len(request.constraints.table.names))))

def all_high(request):
    return order(replace(request, constraints=replace(request.constraints, target=0.0)))

first = Policy("first-first", order)
POLICIES["first-first"] = first
POLICIES["high"] = replace(first, name="high", decide=all_high, heeds_target=False)

def broken(settings):
    raise KeyError("no place")

class Lines:
    def __init__(self, settings):
        self.policy = settings["policy"]
    def write(self, event):
        pass
    def close(self):
        pass

WRITERS["broken"] = broken
WRITERS["lines"] = Lines
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "our_snip.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "our_snip"


def test_a_named_module_adds_a_format_a_policy_and_a_writer(module: str) -> None:
    def name_it() -> None:
        values = {"plugins": module, "formats": "fp8,fp4_64", "policy": "first-first"}
        config = make_config(values)
        assert config.lowest_format == "fp4_64"
        (writer,) = added_writers(config.model_dump(mode="json"))
        assert (type(writer).__name__, writer.policy) == ("Lines", "first-first")

    assert run_copy(name_it) == 0


def test_a_policy_may_have_no_target(module: str) -> None:
    def plan() -> None:
        load_plugins([module])
        problem = problem_of([[0.0, 1.0]] * 4, target=0.5)
        plans = [make_plan(problem, PlanSettings(policy=p)) for p in ("first-first", "high")]
        assert [(plan.target, plan.efficiency) for plan in plans] == [(0.5, 0.5), (0.0, 0.0)]

    assert run_copy(plan) == 0


def test_the_solvers_process_has_the_plugins_of_the_run(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solver_process, "loaded_plugins", lambda: (module,))
    request = {
        "problem": problem_of([[0.0, 1.0]] * 2).to_dict(),
        "settings": {"policy": "first-first"},
        "previous": None,
        "iteration": 3,
    }
    command = worker_command()
    assert command[-1] == module
    reply = subprocess.run(
        command,
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        check=True,
        env=worker_environment(),
    ).stdout
    assert PrecisionPlan.from_dict(json.loads(reply)["plan"]).policy == "first-first"


def test_what_cannot_be_imported_is_named() -> None:
    with pytest.raises(UsageError, match="plugins: cannot import 'no_such_module': ModuleNot"):
        make_config({"plugins": "no_such_module"})


@pytest.mark.parametrize("name", [".", "../ours", "our-plugin", "ours.py/snip", "a..b"])
def test_what_is_no_name_of_a_module_is_refused_without_a_traceback(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=r"plugins: '.*' is not the name of a module; write it as"):
        make_config({"plugins": name})
    assert caplog.records == []


def test_a_module_that_ends_the_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_script_not_a_plugin.py").write_text("raise SystemExit(7)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="cannot import 'a_script_not_a_plugin': SystemExit: 7"):
        make_config({"plugins": "a_script_not_a_plugin"})


def test_words_of_a_script_are_its_own() -> None:
    words = ["pretrain.py", "--plugins", "its_own"]
    assert split_plugins(["--plugins", "a,b", *words]) == (["a", "b"], words)
    assert split_plugins(["--cpu", *words]) == ([], ["--cpu", *words])
    theirs = ["preflight", "--gpus", "8", "train.py", "--plugins", "theirs"]
    assert split_plugins(theirs) == ([], theirs)
    assert split_plugins(["preflight", "--json", "--plugins", "a", "x.py"])[0] == ["a"]
    assert split_plugins(["plan", "--plugins=a", "p", "--plugins", "b"]) == (
        ["a", "b"],
        ["plan", "p"],
    )


def test_a_plugin_in_the_current_directory_is_found_wherever_python_looks(tmp_path: Path) -> None:
    """A rank is started with -P, and the command's own folder is not the current one."""
    (tmp_path / "here_snip.py").write_text(PLUGIN)
    (tmp_path / "types.py").write_text("raise ImportError('the wrong module')\n")
    program = "from megatron_snip.config import make_config\n"
    program += "print(make_config({'plugins': 'here_snip', 'policy': 'first-first'}).policy)"
    command = [sys.executable, "-P", "-c", program]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("first-first\n", 0), done.stderr


def test_a_file_of_a_run_with_plugins_names_those_that_are_not_loaded(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", Shape(config()))
    mark(run)
    settings = run / "config.yaml"
    settings.write_text(settings.read_text().replace("plugins: []", f"plugins: [{module}]"))
    file = next((run / "plans").iterdir())
    file.write_text(file.read_text().replace('"fp4"', '"fp4_64"'))

    def read() -> None:
        for words in (["report", run], ["export", file, "--to", "yaml", "--output", "o.yaml"]):
            assert main(list(map(str, words))) == 2
            line = capfd.readouterr().err
            assert "unknown format 'fp4_64'" in line and line.count("\n") == 1
            assert f"add --plugins {module}" in line

    assert run_copy(read) == 0


def test_a_command_has_the_plugins_that_stand_anywhere_in_it(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    problem = tmp_path / "problem.json"
    write_problem(problem_of([[0.0, 1.0]] * 4, target=0.5), problem)
    words = ["plan", str(problem), "--policy", "first-first"]

    def plan() -> None:
        assert main(words) == 2
        assert "first-first" in capfd.readouterr().err
        assert main(["--plugins", module, *words]) == 0
        assert main([f"--plugins={module},", *words]) == 0
        assert main([*words, "--plugins", module]) == 0
        assert main([words[0], f"--plugins={module}", *words[1:]]) == 0
        assert main(["--plugins"]) == main(["--plugins", ""]) == 2

    assert run_copy(plan) == 0


def test_an_error_in_a_plugin_is_a_line_with_its_place_and_then_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Any error, also one that would be the machine's if SNIP had raised it."""
    broken = """
from megatron_snip.planning.policies import POLICIES, Policy

def no_entry(request):
    return {}["no entry"]

def no_file(request):
    return open("/no/such/file")

for decide in (no_entry, no_file):
    POLICIES[decide.__name__] = Policy(decide.__name__, decide, needs_statistics=True)
"""
    file = tmp_path / "broken_snip.py"
    file.write_text(broken)
    monkeypatch.syspath_prepend(str(tmp_path))
    problem = tmp_path / "problem.json"
    write_problem(problem_of([[0.0, 1.0]] * 4, target=0.5), problem)

    def command() -> None:
        for words, said, line in (
            (["plan", problem, "--policy", "no_entry"], "KeyError: 'no entry'", 5),
            (["plan", problem, "--policy", "no_file"], "No such file or directory", 8),
            (["pareto", problem, "--policy", "no_entry"], "KeyError: 'no entry'", 5),
            (["score", problem, "no_entry:0.5"], "KeyError: 'no entry'", 5),
        ):
            assert main(["--plugins", "broken_snip", *map(str, words)]) == 1
            first, second, *rest = capfd.readouterr().err.splitlines()
            assert first.startswith("megatron-snip: ") and said in first
            assert first.endswith(f" (in a plugin: {file}:{line})")
            assert second.startswith("Traceback") and said in rest[-1]

    assert run_copy(command) == 0


def test_a_run_that_names_a_module_does_not_get_it_imported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Shape(config()))
    settings = run / "config.yaml"
    text = settings.read_text()
    assert "plugins: []" in text
    settings.write_text(text.replace("plugins: []", "plugins: [no_such_module]"))
    assert read_run(run).snip == config()
