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
from pathlib import Path

from megatron_snip.cli.commands import COMMANDS, build_parser
from megatron_snip.cli.train import read_settings
from megatron_snip.config import make_config
from megatron_snip.errors import UsageError
from megatron_snip.flags import given_values
from megatron_snip.patches.arguments import DEST, PREFIX, add_snip_arguments
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
    """A command as a page shows it.

    Attributes:
        page: the page's name.
        text: one line; continued lines are joined.
        mark: what it needs, or None where it runs anywhere.
    """

    page: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        """Return the page and the command, as test names show them."""
        return f"{self.page}: {self.text}"

    @property
    def words(self) -> list[str]:
        """The words of the command, without VARIABLE=value before it."""
        words = shlex.split(self.text, comments=True)
        while words and _ENVIRONMENT.match(words[0]):
            words.pop(0)
        return words


def shown_commands(pages: Sequence[Path]) -> list[Shown]:
    """Return every command of the pages."""
    return [shown for page in pages for shown in commands_in(page.read_text(), page.name)]


def commands_in(text: str, page: str) -> Iterator[Shown]:
    """Yield the commands of one page's text."""
    for fence in _FENCE.finditer(text):
        mark = None
        for line in fence[1].replace("\\\n", " ").splitlines():
            line = " ".join(line.split())
            if line in MARKS:
                mark = line
            elif line and not line.startswith("#"):
                yield Shown(page, line, mark)


def check_words(shown: Shown) -> None:
    """Refuse a command whose program, flags or files are not those of this project.

    Raises:
        UsageError: one line that says what is wrong.
    """
    words = shown.words
    if not words:  # it only sets variables
        return
    for word in words:
        _check_file(word)
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
        _check_targets(rest)
    elif program == "pip":
        _check_extras(rest)
    elif program not in ("cd", "git", "export", "source") and shown.mark is None:
        raise UsageError(f"nothing checks '{program}'; mark what it needs with one of {MARKS}")


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
    if not any((ROOT / name).is_file() for name in names):
        raise UsageError(f"there is no {' or '.join(names)}")


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
    if wrong:
        raise UsageError(f"SNIP has no flag {wrong[0]}")
    make_config(given_values(args, SnipConfig, DEST))


def _check_file(word: str) -> None:
    """Files of this repository that a word names must be there."""
    name = word.removeprefix("@")
    ours = ("configs/", "launch/", "docs/", "requirements/")
    if name.startswith(ours) and not list(ROOT.glob(name)):
        raise UsageError(f"there is no {name}")


def _check_targets(words: Sequence[str]) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in words:
        if "=" not in word and word not in known:
            raise UsageError(f"the Makefile has no target {word}")


def _check_extras(words: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        for extra in re.findall(r"\[([\w,]+)\]", word):
            for name in extra.split(","):
                if name not in project["optional-dependencies"]:
                    raise UsageError(f"pyproject.toml has no extra {name}")


def _index(words: Sequence[str], *endings: str) -> int | None:
    return next((k for k, word in enumerate(words) if word.endswith(endings)), None)
