"""Every command that README and docs show: what runs anywhere is run, the rest is checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.errors import UsageError
from tests.unit.docs.commands import ROOT, Shown, check_words, commands_in, shown_commands
from tests.unit.reporting.runs import Shape, config, write_run

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = shown_commands(PAGES)
ELSEWHERE = ("train", "compare")
"""Subcommands that tests of their own run; here their settings are read."""


def runs_here(shown: Shown) -> bool:
    words = shown.words
    ours = bool(words) and words[0] == "megatron-snip"
    return ours and shown.mark is None and words[1] not in ELSEWHERE


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the runs that pages speak of."""
    folder = tmp_path_factory.mktemp("docs")
    settings = config(start_step=21, interval=8)
    write_run(folder / "runs" / "demo", Shape(settings, iterations=32, layers=4))
    write_run(folder / "runs" / "other", Shape(config(enabled=False), iterations=32))
    for name in ("configs", "docs", "launch"):
        (folder / name).symlink_to(ROOT / name)
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    yield folder
    patch.undo()


@pytest.mark.parametrize("shown", dict.fromkeys(SHOWN), ids=str)
def test_its_words_are_right(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # what `--config configs/...` is relative to
    check_words(shown)


@pytest.mark.parametrize("text", dict.fromkeys(s.text for s in SHOWN if runs_here(s)))
def test_it_runs(
    text: str,
    sandbox: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the order of the pages: some read what others wrote."""
    words = Shown("", text, None).words[1:]
    if words[0] == "calibrate":
        words += ["--seconds", "0.002"]
    assert main(words) == 0
    assert capsys.readouterr().out


def test_enough_is_shown_to_be_worth_checking() -> None:
    assert len([shown for shown in SHOWN if runs_here(shown)]) > 10
    assert any(shown.mark == "# on a GPU cluster" for shown in SHOWN)


def test_prompts_continuations_marks_and_variables() -> None:
    text = (
        "```console\n$ make demo\nsome output\n```\n"
        "```bash\n# a remark\nA=1 megatron-snip plan \\\n    x.json\n"
        "# on a GPU cluster\ntorchrun a\n```\n"
        "```python\nmake nothing\n```\n"
    )
    shown = list(commands_in(text, "p"))
    assert [s.text for s in shown] == ["make demo", "A=1 megatron-snip plan x.json", "torchrun a"]
    assert [s.mark for s in shown] == [None, None, "# on a GPU cluster"]
    assert shown[1].words == ["megatron-snip", "plan", "x.json"]


@pytest.mark.parametrize(
    "text",
    [
        "megatron-snip plan --no-such-flag x.json",
        "megatron-snip nothing",
        "megatron-snip train --config configs/demo.yaml --snip-intervall 5",
        "megatron-snip train --config configs/nothing.yaml",
        "torchrun -m megatron_snip pretrain_gpt.py --snip --snip-intervall 5",
        "torchrun -m megatron_snip pretrain_gpt.py --snip --snip-interval -5",
        "torchrun -m megatron_snip pretrain_gpt.py @configs/models/nothing.args --snip",
        "bash launch/torchrun.sh --dry-run pretrain_gpt.py --snip-intervall 5",
        "make nothing",
        "pip install 'megatron-snip[nothing]'",
        "python docs/nothing.py",
        "frobnicate",
    ],
)
def test_wrong_commands_are_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UsageError):
        check_words(Shown("p", text, None))
