"""The commands that a page of the documentation shows.

A fence of `bash` holds commands. A comment line of `MARKS` names what the commands below it, in the
same fence, need. `$SNIP` is the checkout of this repository.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile

MARKS = (
    "# on a GPU cluster",
    "# needs a network and an account",
    "# needs a network",
    "# needs Docker",
    "# needs Slurm",
    "# needs a checkpoint",
    "# needs Megatron-LM",
    "# needs Megatron-Bridge",
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
        """The words of the command, without VARIABLE=value before it; paths from the checkout."""
        words = shlex.split(self.text.replace("$SNIP/", ""), comments=True)
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
