"""Bad input ends every command with one line, before it writes anything."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.planning.plan import write_plan
from megatron_snip.planning.problem import write_problem
from tests.unit.planning.build import name_of, plan_of, problem_of
from tests.unit.reporting.runs import Shape, config, write_run

PROBLEM = problem_of([[0.0, float(loss)] for loss in range(4)], 0.5, stages=[0, 0, 1, 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good files and bad ones."""
    folder = tmp_path_factory.mktemp("input")
    write_problem(PROBLEM, folder / "problem.json")
    write_plan(plan_of(["fp8"] * 4), folder / "plan.json")
    write_plan(plan_of(["fp8"] * 3), folder / "three.json")
    write_run(folder / "run", Shape(config(), iterations=3))
    (folder / "run/divergences/7.json").write_text('{"version": 1}')
    linear = {"name": "a", "options": {"fp4": {"rel_error": "inf"}}}
    table = {"version": 2, "iteration": 8, "linears": [linear]}
    (folder / "run/divergences/8.json").write_text(json.dumps(table))
    (folder / "snip.yaml").write_text("enabled: true\nefficiency_target: 0.75\n")
    (folder / "nested.yaml").write_text("snip:\n  efficency_target: 0.75\n")
    (folder / "yes.yaml").write_text("efficiency_target: yes\n")
    (folder / "nul.yaml").write_text('save: "a\\0b"\n')
    (folder / "run/.megatron-snip").touch()
    (folder / "link.json").symlink_to("problem.json")
    (folder / "hard.json").hardlink_to(folder / "problem.json")
    (folder / "old").mkdir()
    for name in ("empty", "t.json", "a.yaml", "train.yaml", "old/report.html"):
        (folder / name).touch()
    (folder / "list.jsonl").write_text("[]\n")
    (folder / "loop").symlink_to("loop")
    return folder


TARGETS = ["", "0:1", "0:1:0", "1:0:0.1", "0:1:1e-999999999", "0:1e999999999:1e999999999"]
TARGETS += ["0:2:0.5", "nan", "inf", "0:1:0.1,0.2"]
BAD = {
    "": [
        ("none.py", "cannot find the script 'none.py'"),
        ("--cpu", "--cpu needs a script"),
        ("problem.json", "no Python script; a command comes before its file: megatron-snip"),
        ("--cpu run/config.yaml", "'run/config.yaml' is no Python script"),
        ("empty", "'empty' is no Python script"),
        ("nonsense", "unknown command 'nonsense'; commands are train, plan"),
        ("--snip none.py", "'--snip' comes before the script; the order is: torchrun"),
        ("torchrun none.py --snip", "-m megatron_snip [--cpu] none.py ARGS --snip"),
        ("plna x", "unknown command 'plna' (did you mean 'plan'?)"),
        ("--verison", "unknown flag '--verison' (did you mean '--version'?)"),
    ],
    "train --run-dir new": [
        ("--snip-efficency-target 1", "did you mean '--snip-efficiency-target'?"),
        ("--hidden-size 250", "hidden_size (250)"),
        ("--tensor-model-parallel-size 2 --nproc-per-node 1", "a multiple of 2 ranks, got 1"),
        ("--nproc-per-node none", "--nproc-per-node"),
        ("--config nowhere.yaml", "nowhere.yaml"),
        ("--config snip.yaml", "'snip.yaml' has settings of SNIP's; name it with --snip-config"),
        ("--config nested.yaml", "'snip.efficency_target' (did you mean 'efficiency_target'?)"),
        ("--snip-config yes.yaml", "efficiency_target: must be a number, got true"),
        ("--config nul.yaml", "a path cannot have a NUL in it"),
        ("--save ''", "save: the path is empty"),
        ("--snip-plan-file ''", "plan_file: the path is empty"),
        ("--snip-formats fp8 fp4", "unrecognized arguments: fp4; see 'megatron-snip train"),
    ],
    "plan problem.json": [
        ("--target 1.5", "--target: must be less than or equal to 1, got '1.5'"),
        ("--target abc", "must be a valid number, got 'abc'; see 'megatron-snip plan"),
        ("--pin =fp8", "--pin: '=fp8' is not GLOB=OPTION, e.g. 'decoder.layers.0.*=fp8'"),
        ("--pin 'encoder.*=fp8'", "no linear's name matches"),
        ("--first-layers 99=fp8", "--first-layers: got 99; the largest block has 4 layers"),
        ("--last-layers 5=fp8", "--last-layers: got 5; the largest block has 4 layers"),
        ("--first-layers x=fp8", "--first-layers: must be an integer from 0"),
        ("--change-penalty 2", "needs --previous"),
        ("--workers 0", "--workers: "),
        ("--workers 9999999999", "--workers: must be less than or equal to 1024"),
        ("--pipeline-balance some", "--pipeline-balance"),
        ("--policy SNIP", "unknown policy 'SNIP' (did you mean 'snip'?)"),
        ("--calibration absent.json", "--cost time"),
        ("--policy uniform-fp4 --target 0.5", "does not use --target"),
        ("--cost time", "calibrate"),
        ("--cost time --calibration three.json", "calibration table 'three.json'"),
        ("--output /absent/folder/plan.json", "cannot write"),
        ("--output -", "--output: '-' is no file; /dev/stdout prints the result"),
        ("--output problem.json", "'problem.json' is 'problem.json', which this command reads"),
        ("--output ./run/../problem.json", "which this command reads"),
        ("--output link.json", "'link.json' is 'problem.json', which this command reads"),
        ("--output hard.json", "'hard.json' is 'problem.json', which this command reads"),
        ("--previous plan.json --output plan.json", "'plan.json', which this command reads"),
        ("--cost time --calibration t.json --output t.json", "which this command reads"),
        ("--output run/metrics.jsonl", "is a file of the run in"),
        ("--output run/plans/99.json", "is a file of the run in"),
        ("--output 'a\0b'", "cannot write 'a\\x00b': "),
        ("--previous problem.json", "'problem.json' is a problem, and a plan is wanted"),
        (
            "--previous three.json",
            f"the plan does not have {name_of(3)}",
        ),
    ],
    "plan": [
        (
            "three.json",
            "'three.json' is a plan or a measurement, and a problem is wanted: problems/",
        ),
        ("list.jsonl", "problem file 'list.jsonl'"),
        ("none.json", "'none.json'"),
        ("run", "'run' is a folder; name a file, such as a run's problems/<iteration>.json"),
    ],
    "pareto problem.json": [
        *((f"--targets '{text}'", "--targets") for text in TARGETS),
        ("--policy uniform-fp8", "no frontier"),
        ("--policy min-abs-err", "needs the score 'abs_error'"),
    ],
    "stats": [
        ("run --iteration 20", "no refresh at 20 in"),
        ("run --iteration x", "--iteration: must be an integer from 1"),
        ("run/divergences", "no statistics"),
        ("none", "cannot find the run directory 'none'"),
        ("plan.json", "'plan.json' is a file; give the run's directory"),
        ("loop", "cannot find the run directory 'loop'"),
        ("x" * 300, "File name too long"),
        ("run --csv --json", "argument --json: not allowed with argument --csv"),
        ("run --health --sort loss", "--sort orders the table of divergences"),
        ("run --iteration 7", "7.json': version 1"),
        ("run --iteration 8", "options.fp4.rel_error: must be a valid number, got 'inf'"),
    ],
    "report": [
        ("none", "cannot find the run directory 'none'"),
        ("run --reference none", "cannot find the reference 'none'"),
        ("run --reference " + "x" * 300, "cannot find the reference"),
        ("run --reference list.jsonl", "line 1: must be a valid dictionary, got []"),
        ("run --reference empty", "'empty' has no metrics yet"),
        ("x" * 300, "File name too long"),
        ("run --output run/config.yaml", "cannot write"),
        ("run --reference old/report.html --output old", "which this command reads"),
        ("", "the following arguments are required: RUN"),
    ],
    "calibrate --output new.json": [
        ("", "nothing to measure"),
        ("--linear x=12", "GLOB=OUTxIN"),
        ("--linear x=8x8 --tokens 0", "--tokens: must be an integer from 1"),
        ("--linear x=99999999x99999999 --formats bf16", "does not fit into the memory"),
        ("--linear x=8x8 --seconds nan", "--seconds"),
        ("--linear x=8x8 --formats fp5", "unknown format 'fp5'"),
        ("--config absent.yaml", "'absent.yaml': No such file or directory"),
        ("--linear x=8x8 --output absent/t.json", "is no file in a folder that exists"),
        ("--linear x=8x8 --output .", "is no file in a folder that exists"),
        ("--linear x=8x8 --output -", "'-' is no file; /dev/stdout prints the result"),
        ("--linear x=8x8 --output plan.json", "'plan.json' holds a plan; name another file"),
        ("--config train.yaml --output train.yaml", "which this command reads; name another"),
    ],
    "export plan.json --output new.yaml --capability": [
        ("ten", "--capability: must be like 9.0"),
        ("10.0 --output plan.json", "'plan.json' is 'plan.json', which this command reads"),
        ("10.0 --output three.json", "'three.json' holds a plan; name another file"),
        ("10.0 --pipeline-stages 3", "3 pipeline stages holds is not known; give the number of"),
        ("10.0 --pipeline-stages 3 --chunk-layers 2,2", "2 model chunks for 3 pipeline stages"),
        ("10.0 --pipeline-stages two", "--pipeline-stages: must be"),
        ("10.0 --chunk-layers 2,2", "gives 2 model chunks, and the number of pipeline stages"),
        ("10.0 --pipeline-stages 2 --chunk-layers 1,2", "3 layers in 2 chunks"),
        ("8.0 --nearest --chunk-layers x", "--chunk-layers: must be"),
    ],
    "export plan.json --to yaml --output new.yaml": [
        ("--nearest", "--nearest is for programs that lack an option; --to yaml lacks none"),
    ],
    "import --problem problem.json --output new.json": [
        ("absent.yaml", "'absent.yaml': No such file or directory"),
        ("a.yaml --output a.yaml", "'a.yaml' is 'a.yaml', which this command reads"),
        ("absent.yaml --output problem.json", "'problem.json', which this command reads"),
        ("plan.json", "'plan.json' is no precision file of Megatron: no 'matchers'"),
        ("empty", "'empty' is no precision file of Megatron: no 'matchers'"),
        ("", "the following arguments are required: FILE.yaml"),
    ],
    "preflight": [
        ("", "needs a script: megatron-snip preflight SCRIPT ARGS"),
        ("absent.py --snip", "cannot find the script 'absent.py'"),
        ("plan.json", "'plan.json' is no Python script"),
        ("llama3_8b_pretrain", "'llama3_8b_pretrain' is no script, and Megatron-Bridge"),
        ("--gpus 0 absent.py", "--gpus: must be an integer from 1"),
        ("--capability ten absent.py", "--capability: must be like 9.0 or 10.0, got 'ten'"),
        ("--jsno absent.py", "unknown flag '--jsno'"),
        ("--json absent.py --foo", "cannot find the script 'absent.py'"),
        ("--json @absent", "cannot read the argument file 'absent'"),
    ],
    "doctor": [("--jsno", "unknown flag '--jsno'")],
}
CASES = [(f"{command} {words}", text) for command, rows in BAD.items() for words, text in rows]


@pytest.mark.parametrize(("words", "complaint"), CASES)
def test_it_is_one_line_that_names_what_is_wrong(
    words: str, complaint: str, folder: Path, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = contents(folder)
    assert complaint in refused(*shlex.split(words))
    assert contents(folder) == before


def contents(folder: Path) -> dict[Path, bytes]:
    """Bytes of every file, and nothing for a folder."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
