"""The messages that docs/troubleshooting.md quotes are messages of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^\| `(.+?)` \| .+ \| .+ \|$", PAGE, re.MULTILINE)


def plain(text: str) -> str:
    """Return a message with `...` for what is filled in."""
    text = re.sub(r"%[-+.\d]*[sdrfg]", "...", text)
    return re.sub(r"(\.\.\.\s*)+", "...", text).strip()


def texts_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def messages() -> tuple[str, ...]:
    """Return every text in the sources."""
    found: list[str] = []
    for folder in ("megatron_snip", "patches", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            found += map(plain, texts_of(ast.parse(path.read_text())))
    return tuple(found)


def is_message(quoted: str) -> bool:
    """Whether a text of the sources holds the quotation, or several texts a long part each.

    The code appends reasons and hints to some messages.
    """
    quoted = plain(quoted).strip(" .")
    if any(quoted in text for text in messages()):
        return True
    for match in re.finditer(re.escape("..."), quoted):
        head, tail = quoted[: match.start()].strip(" ."), quoted[match.end() :].strip(" .")
        if min(len(head), len(tail)) > 12 and is_message(head) and is_message(tail):
            return True
    return False


@pytest.mark.parametrize("quoted", QUOTED)
def test_every_row_quotes_a_message_of_the_code(quoted: str) -> None:
    assert is_message(quoted)


def test_invented_messages_are_found() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(QUOTED) == len(rows) > 40  # each has a cause and a remedy
    assert not is_message("the plan of step ... goes: ...")


def test_pages_link_to_existing_pages_and_name_no_local_paths() -> None:
    places = re.compile(r"(?<![\w.])/(?:work|root|tmp|home)\b")
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        text = page.read_text()
        assert not places.search(text), page.name
        for target in re.findall(r"\]\(([\w-]+\.md)", text):
            assert (ROOT / "docs" / target).is_file(), f"{page.name} links to {target}"
