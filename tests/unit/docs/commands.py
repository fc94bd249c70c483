"""The commands that the documentation shows, and a check of their programs, flags and files.

A fence of `bash` holds commands. A comment line of `MARKS` names what the commands below it, in the
same fence, need. Tests do not have that, so they check only the words of these commands.
"""

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from megatron_snip.cli.commands import COMMANDS, build_parser
from megatron_snip.cli.train import read_settings
from megatron_snip.config import make_config
from megatron_snip.errors import UsageError
from megatron_snip.flags import given_values
from megatron_snip.patches.arguments import PREFIX, add_snip_arguments
from megatron_snip.trainer.config import SnipConfig

ROOT = Path(__file__).parents[3]
MARKS = (
    "# on a GPU cluster",
    "# in a Megatron-LM checkout",
    "# needs a network and an account",
    "# needs a network",
    "# needs Docker",
    "# needs Slurm",
)
_FENCE = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ENVIRONMENT = re.compile(r"^[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it, in one line; `mark` is what it needs, None if it runs here."""

    page: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def words(self) -> list[str]:
        """The words of the command, without VARIABLE=value before it."""
        words = shlex.split(self.text, comments=True)
        return list(dropwhile(_ENVIRONMENT.match, words))


def commands_in(text: str, page: str) -> Iterator[Shown]:
    for fence in _FENCE.finditer(text):
        mark = None
        for line in fence[1].replace("\\\n", " ").splitlines():
            line = " ".join(line.split())
            if line in MARKS:
                mark = line
            elif line and not line.startswith("#"):
                yield Shown(page, line, mark)


def check_words(shown: Shown) -> None:
    """Refuse a command whose program, flags or files are not those of this project."""
    words = shown.words
    if not words:  # it only sets variables
        return
    for name in (word.removeprefix("@") for word in words):
        if name.startswith(("configs/", "launch/", "docs/", "requirements/")):
            _check(bool(list(ROOT.glob(name))), f"there is no {name}")
    program, rest = Path(words[0]).name, words[1:]
    if program == "megatron-snip":
        check_subcommand(rest)
    elif program in ("python", "python3", "torchrun"):
        _check_python(rest)
    elif program in ("torchrun.sh", "slurm.sbatch"):
        _check_job(rest)
    elif program in ("sbatch", "bash") and (place := _index(rest, ".sbatch", ".sh")) is not None:
        _check_job(rest[place + 1 :])
    elif program == "make":
        known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in rest:
            _check("=" in word or word in known, f"the Makefile has no target {word}")
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            missing = set(extra.split(",")) - set(project["optional-dependencies"])
            _check(not missing, f"pyproject.toml has no extras {missing}")
    elif program not in ("cd", "git", "export", "source"):
        message = f"nothing checks '{program}'; mark what it needs with one of {MARKS}"
        _check(shown.mark is not None, message)


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
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_snip_arguments(parser)
    args, unknown = parser.parse_known_args(words[1:])
    wrong = [word for word in unknown if word.startswith(f"--{PREFIX}")]
    _check(not wrong, f"SNIP has no flags {wrong}")
    make_config(given_values(args, SnipConfig, PREFIX))


def _index(words: Sequence[str], *endings: str) -> int | None:
    return next((k for k, word in enumerate(words) if word.endswith(endings)), None)
