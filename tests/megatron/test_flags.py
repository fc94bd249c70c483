"""The flags in Megatron's own parser; bad input ends in one line with status 2."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.training import arguments

from megatron_snip.config import SnipConfig
from megatron_snip.flags import flag_name
from megatron_snip.patches.install import REGISTRY, install_for
from tests.megatron.lab import CPU, MODEL, SCRIPT, SNIP, Lab, saving
from tests.processes import run_python

WORDS = [*MODEL.split(), *CPU.split()]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def run(*flags: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["pretrain.py", *WORDS, *flags])
        install_for(sys.argv[1:])
        return arguments.parse_args()

    yield run
    REGISTRY.uninstall()


def test_every_setting_is_a_flag_of_megatrons_parser(
    parse: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    for field in SnipConfig.model_fields:
        flag = "--snip" if field == "enabled" else flag_name("snip-", field)
        assert flag in text
    assert "--snip-config" in text and "--tensor-model-parallel-size" in text


def test_without_flags_the_namespace_is_megatrons(
    parse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *WORDS])
    plain = vars(arguments.parse_args())
    assert vars(parse()) == plain


REFUSED = {
    "pin": (["--snip-pins", "decoder.layers.9.*=fp8"], "--snip-pins: 'decoder.layers.9.*'"),
    "plan": (["--snip-plan-file", "none.json"], "--snip-plan-file: cannot read"),
    "typo": (["--snip-intervall", "4"], "did you mean '--snip-interval'?"),
    "no-te": (
        ["--transformer-impl", "transformer_engine"],
        "Transformer Engine cannot be imported; install it, or give --transformer-impl local",
    ),
    "cpu-last": (["--cpu"], "--cpu comes before the script: -m megatron_snip --cpu "),
}


BY_THE_MODEL = ("pin", "plan")
"""What only the built model shows; the rest ends in Megatron's validation phase."""


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_ends_in_one_line(lab: Lab, name: str) -> None:
    flags, named = REFUSED[name]
    run = lab.run("one", [*SNIP, *flags])
    assert run.statuses == (2,), run.report
    lines = [x for x in run.logs[0].splitlines() if x.startswith("megatron-snip: error:")]
    assert len(lines) == 1 and named in lines[0], run.report
    assert "Traceback" not in run.logs[0]
    before_groups = "initializing torch distributed" not in run.logs[0]
    assert before_groups == (name not in BY_THE_MODEL), run.report


def test_a_script_with_its_own_flags(lab: Lab) -> None:
    run = lab.run("one", SNIP, {"TINY_OWN_FLAGS": "1"})
    assert run.statuses == (2,), run.report
    text = "reached neither Megatron-LM's nor Megatron-Bridge's pretrain, so SNIP did nothing; "
    assert text in run.logs[0]


def test_a_checkpoint_of_another_version(lab: Lab) -> None:
    save = lab.output("other-version")
    lab.run("one", [*SNIP, *saving(save)], {"TINY_BAD_STATE": "9"})
    run = lab.run("one", [*SNIP, "--load", str(save)])
    assert run.statuses == (2,), run.report
    lines = [x for x in run.logs[0].splitlines() if x.startswith("megatron-snip: error:")]
    assert len(lines) == 1 and "version 9; this megatron-snip reads version 3 or 4" in lines[0]
    assert (
        "a new run from its weights (Megatron's --finetune) and its last plan (--snip-pl"
        in lines[0]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "megatron_snip", "--snip", SCRIPT], "'--snip' comes before the script; the order"),
        (["megatron_snip", SCRIPT, "--snip"], "can't open file '{folder}/megatron_snip'"),
        ([SCRIPT, *CPU.split(), "--snip"], "unrecognized arguments: --snip"),
    ],
)
def test_the_order_of_torchruns_words(words: list[str], message: str, tmp_path: Path) -> None:
    """Without -m this package does not run; docs/troubleshooting.md has the messages of others."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    done = run_python(*launcher, *words, cwd=tmp_path, timeout=280)
    assert message.format(folder=tmp_path) in done.stderr
