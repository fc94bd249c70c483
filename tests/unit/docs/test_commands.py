"""Commands in README and docs: those of `megatron-snip` are run, the words of others checked.

Of a command that needs what tests do not have (`shown_commands.MARKS`) only the words are checked.
The page of flags is what the parsers give.
"""

import argparse
import re
import runpy
import tomllib
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.cli.commands import COMMANDS, build_parser
from megatron_snip.cli.train import read_settings
from megatron_snip.errors import UsageError
from megatron_snip.patches.arguments import read_cli_args, snip_config
from tests.processes import ROOT
from tests.unit.docs.shown_commands import MARKS, Shown, commands_in
from tests.unit.reporting.runs import Shape, config, write_run
from tests.unit.timed_machine import Machine


def check_words(shown: Shown) -> None:
    """Refuse a command whose program, flags or files are not those of this project."""
    words = shown.words
    if not words:  # it only sets variables
        return
    for name in (word.removeprefix("@") for word in words):
        if name.startswith(("configs/", "launch/", "docs/", "requirements/")):
            _check(bool(list(ROOT.glob(name))), f"there is no {name}")
    program, rest = Path(words[0]).name, words[1:]
    # The Slurm script adds --save.
    saves = "--save" in rest or any(word.endswith("slurm.sbatch") for word in words)
    if saves and any(word.startswith("pretrain_") for word in rest):
        _check("--save-interval" in rest, "Megatron refuses --save without --save-interval")
    if program == "megatron-snip":
        check_subcommand(rest)
    elif program in ("python", "python3", "torchrun"):
        _check_python(rest)
    elif program in ("torchrun.sh", "slurm.sbatch"):
        _check_job(rest)
    elif program in ("sbatch", "bash") and any(map(_is_job, rest)):
        _check_job([*dropwhile(lambda word: not _is_job(word), rest)][1:])
    elif program == "make":
        known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in rest:
            _check("=" in word or word in known, f"the Makefile has no target {word}")
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            missing = set(extra.split(",")) - set(project["optional-dependencies"])
            _check(not missing, f"pyproject.toml has no extras {missing}")
    elif program not in ("cd", "export", "git", "rm", "source"):
        message = f"nothing checks '{program}'; mark what it needs with one of {MARKS}"
        _check(shown.mark is not None, message)


def _is_job(word: str) -> bool:
    return word.endswith((".sbatch", ".sh"))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def check_subcommand(words: Sequence[str]) -> None:
    """Parse a subcommand's words; of `train` build the settings as well."""
    if words == ["--version"] or words == ["--help"]:
        return
    args = build_parser(words[0] if words[0] in COMMANDS else None).parse_args(words)
    if args.command == "train":
        read_settings(args)


def _check_python(words: list[str]) -> None:
    """Of `... -m megatron_snip WORDS`, `python -m MODULE` or `python FILE`."""
    if "megatron_snip" in words:
        _check_job(words[words.index("megatron_snip") + 1 :])
        return
    # Megatron's scripts with Megatron's flags alone.
    if "pretrain_gpt.py" in words or "pretrain_hybrid.py" in words:
        return
    if words[:2] == ["-m", "venv"]:
        return
    names = [words[0]]
    if words[0] == "-m":
        path = words[1].replace(".", "/")
        names = [f"{path}.py", f"{path}/__main__.py"]
    found = any((ROOT / name).is_file() for name in names)
    _check(found, f"there is no {' or '.join(names)}")


def _check_job(words: list[str]) -> None:
    """Of `[--dry-run] [--cpu] train|SCRIPT FLAGS`: parse SNIP's flags; Megatron's are its own."""
    words = [word for word in words if word not in ("--dry-run", "--cpu")]
    if words and words[0] in COMMANDS:
        check_subcommand(words)
        return
    snip_config(argparse.Namespace(), read_cli_args(words[1:]).given)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = [shown for page in PAGES for shown in commands_in(page.read_text(), page.name)]


def runs_here(shown: Shown) -> bool:
    words = shown.words  # trainings have their own tests
    return shown.mark is None and words[:1] == ["megatron-snip"] and words[1] != "train"


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the runs that the commands read."""
    folder = tmp_path_factory.mktemp("docs")
    settings = config(start_step=21, interval=105)  # files of 21 and 126, as the demo has
    write_run(folder / "runs" / "demo", Shape(settings, iterations=130, layers=4))
    settings = config(start_step=12, interval=10)  # the job of the page on getting started
    write_run(folder / "runs" / "gpt", Shape(settings, iterations=30, layers=2))
    write_run(folder / "runs" / "bf16", Shape(config(enabled=False), iterations=32))
    for name in ("configs", "docs", "launch"):
        (folder / name).symlink_to(ROOT / name)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    yield folder
    patch.undo()


@pytest.mark.parametrize("shown", dict.fromkeys(SHOWN), ids=str)
def test_its_program_flags_and_files_exist(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # what `--config configs/...` is relative to
    check_words(shown)


@pytest.mark.parametrize("page", dict.fromkeys(s.page for s in SHOWN if runs_here(s)))
def test_a_page_runs(
    page: str, sandbox: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order: some commands read what others of the page wrote. Seconds are those of a model."""
    Machine(monkeypatch).share = lambda option: option.bits / 48
    for shown in dict.fromkeys(s for s in SHOWN if s.page == page and runs_here(s)):
        words = shown.words[1:]
        if words[0] == "calibrate":
            words += ["--seconds", "0.002"]
        assert main(words) == 0, str(shown)
        assert capsys.readouterr().out, str(shown)


def test_the_page_of_flags_is_fresh() -> None:
    program = runpy.run_path(str(ROOT / "docs" / "flags_page.py"))
    stored = (ROOT / "docs" / "flags.md").read_text()
    assert program["page"]() == stored, f"run: {program['COMMAND']}"


@pytest.mark.parametrize(
    "text",
    [
        "megatron-snip plan --no-such-flag x.json",
        "megatron-snip nothing",
        "megatron-snip train --config configs/demo.yaml --snip-intervall 5",
        "torchrun -m megatron_snip pretrain_gpt.py --snip --snip-interval -5",
        "torchrun -m megatron_snip pretrain_gpt.py --save checkpoints --snip",
        "sbatch $SNIP/launch/slurm.sbatch pretrain_gpt.py --snip",
        "torchrun -m megatron_snip pretrain_gpt.py @configs/models/nothing.args --snip",
        "bash launch/torchrun.sh --dry-run pretrain_gpt.py --snip-intervall 5",
        "sbatch $SNIP/launch/nothing.sbatch pretrain_gpt.py --snip",
        "torchrun -m megatron_snip pretrain_gpt.py --snip --snip-config $SNIP/configs/nothing.yaml",
        "make nothing",
        "pip install 'megatron-snip[nothing]'",
        "python -m benchmarks.nothing",
        "frobnicate",
    ],
)
def test_wrong_commands_are_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UsageError):
        check_words(Shown("p", text, None))
