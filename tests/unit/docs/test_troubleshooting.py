"""What docs/troubleshooting.md quotes is what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.docs.commands import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
ROW = re.compile(r"^\| `(.+?)` \| (.+) \| (.+) \|$", re.MULTILINE)
QUOTED = [match[1] for match in ROW.finditer(PAGE.read_text())]


def plain(text: str) -> str:
    """Return a message with whatever is filled in as `...`."""
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
def said() -> tuple[str, ...]:
    """Every text in the sources."""
    found: list[str] = []
    for room in ("megatron_snip", "patches", "kernels"):
        for path in (ROOT / room).rglob("*.py"):
            found += map(plain, texts_of(ast.parse(path.read_text())))
    return tuple(found)


def is_said(quoted: str) -> bool:
    """Whether a text of the sources holds the quotation, or several of them a long part each.

    The code appends reasons and hints to some messages.
    """
    return _is_pieced_together(plain(quoted).rstrip(". "))


def _is_pieced_together(whole: str) -> bool:
    if any(whole.strip(" .") in text for text in said()):
        return True
    for match in re.finditer(re.escape("..."), whole):
        head, tail = whole[: match.end()].strip(" ."), whole[match.end() :].strip(" .")
        long = len(head) > 12 and len(tail) > 12
        if long and any(head in text for text in said()) and _is_pieced_together(tail):
            return True
    return False


@pytest.mark.parametrize("quoted", QUOTED)
def test_every_symptom_is_a_message_of_the_code(quoted: str) -> None:
    assert is_said(quoted)


def test_invented_symptoms_are_found() -> None:
    assert len(QUOTED) > 40
    assert not is_said("the plan of step ... goes: ...")


def test_every_row_has_a_cause_and_a_remedy() -> None:
    for line in PAGE.read_text().splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(cells) == 3 and all(cells), line


def test_pages_link_to_pages_that_are_there() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([\w-]+\.md)", page.read_text()):
            assert (ROOT / "docs" / target).is_file(), f"{page.name} links to {target}"


def test_pages_speak_of_the_project_alone() -> None:
    places = re.compile(r"(?<![\w.])/(?:work|root|tmp|home)\b")
    for page in [*Path(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        assert not places.search(page.read_text()), page.name
