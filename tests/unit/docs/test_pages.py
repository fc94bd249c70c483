"""Messages in docs/troubleshooting.md are the code's, and the code in docs/extending.md works."""

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.divergence.quality_loss import LOSS_DIVERGENCES
from megatron_snip.formats import FORMATS
from megatron_snip.planning.policies import POLICIES
from megatron_snip.statistics.added import STATISTICS
from tests.processes import ROOT
from tests.unit.reporting.runs import Shape, config, write_run

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
            places_of = (ROOT / "docs" / target, ROOT / target.upper().replace(".MD", ".md"))
            assert any(path.is_file() for path in places_of), f"{page.name} links to {target}"


def test_the_page_of_the_api_names_only_what_exists() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    entries = re.findall(
        r"^::: ([\w.]+)\n(?:    options:\n      members: \[(.+)\])?", page, re.MULTILINE
    )
    assert len(entries) > 10
    for name, members in entries:
        module = import_module(name)
        for member in filter(None, members.split(", ")):
            assert hasattr(module, member), f"api.md names {name}.{member}"


def test_the_diagrams_are_those_of_their_source() -> None:
    diagrams = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))["DIAGRAMS"]
    for name, draw in diagrams.items():
        stored = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
        assert stored == draw().svg(), "run: python docs/diagrams.py"


TEXT = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run to plan for, and tables that are put back."""
    monkeypatch.chdir(tmp_path)
    added = ("input_fourth", "grad_max")  # of the section on statistics
    shape = Shape(config(start_step=21), iterations=24, added=added)
    write_run(tmp_path / "runs" / "demo", shape)
    tables: list[dict[str, Any]] = [FORMATS, POLICIES, STATISTICS, LOSS_DIVERGENCES]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def test_the_table_of_policies_has_each() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text()
    rows = " ".join(re.findall(r"^\| (`.+?) \| (?:yes|no) \|", page, re.MULTILINE))
    assert set(re.findall("`([a-z-]+)`", rows)) == set(POLICIES)


# The last two run elsewhere: tests/unit/test_plugins.py, tests/distributed/test_controller.py.
@pytest.mark.parametrize(("title", "body"), SECTIONS[:5], ids=[title for title, _ in SECTIONS[:5]])
def test_a_section_runs_from_top_to_bottom(title: str, body: str) -> None:
    code = re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
    assert len(code) >= 2 and len(SECTIONS) == 7
    scope: dict[str, Any] = {"__name__": "extending"}
    for block in code:
        exec(compile(block, f"extending.md, {title}", "exec"), scope)
