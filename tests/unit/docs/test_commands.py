"""Commands in README and docs: those of `megatron-snip` are run, the words of others checked.

The page of flags is what the parsers give.
"""

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.errors import UsageError
from tests.unit.docs.commands import ROOT, Shown, check_words, commands_in
from tests.unit.reporting.runs import Shape, config, write_run

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
def test_a_page_runs(page: str, sandbox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order: some commands read what others of the page wrote."""
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


def test_continuations_marks_and_variables() -> None:
    text = (
        "```bash\n# a remark\nA=1 megatron-snip plan \\\n    x.json\n"
        "# on a GPU cluster\ntorchrun a\n```\n"
        "```python\nmake nothing\n```\n"
    )
    shown = list(commands_in(text, "p"))
    assert [s.text for s in shown] == ["A=1 megatron-snip plan x.json", "torchrun a"]
    assert [s.mark for s in shown] == [None, "# on a GPU cluster"]
    assert shown[0].words == ["megatron-snip", "plan", "x.json"]


@pytest.mark.parametrize(
    "text",
    [
        "megatron-snip plan --no-such-flag x.json",
        "megatron-snip nothing",
        "megatron-snip train --config configs/demo.yaml --snip-intervall 5",
        "torchrun -m megatron_snip pretrain_gpt.py --snip --snip-interval -5",
        "torchrun -m megatron_snip pretrain_gpt.py @configs/models/nothing.args --snip",
        "bash launch/torchrun.sh --dry-run pretrain_gpt.py --snip-intervall 5",
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
