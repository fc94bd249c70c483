"""188 published recipes: which run with plans, which are measured; what docs say of each flag."""

from typing import Any

import pytest

from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.te.modules import EXTENSION
from megatron_snip.patches import incompatible
from megatron_snip.patches.fast_flags import FAST_FLAGS
from tests.recipes import count, load, table
from tests.recipes.__main__ import BLOCK, PAGE

NUM_RECIPES = 188
LEAST_MEASURED = 188
LEAST_PLANNED = 183


@pytest.fixture(autouse=True)
def with_te(monkeypatch: pytest.MonkeyPatch) -> None:
    extension: Any = __import__(EXTENSION, fromlist=["HAVE_TE"])
    monkeypatch.setattr(extension, "HAVE_TE", True)


def accepted() -> dict[str, set[str]]:
    """Recipe -> what SNIP does with its flags; a recipe that is refused is left out."""
    found = {}
    for name, args in load():
        try:
            rows = incompatible.check_flags(args)
        except UnsupportedError:
            continue
        found[name] = {row.plans for row in rows}
    return found


def test_how_many_recipes_can_be_measured() -> None:
    assert len(list(load())) == NUM_RECIPES
    assert len(accepted()) >= LEAST_MEASURED


def test_how_many_recipes_run_with_plans() -> None:
    planned = {name for name, effects in accepted().items() if "measures" not in effects}
    assert len(planned) >= LEAST_PLANNED


def test_rows_say_how_many_recipes_they_cost() -> None:
    rows = (*incompatible.INCOMPATIBLE_FLAGS, *FAST_FLAGS)
    assert {row.flag: row.num_recipes for row in rows} == {row.flag: count(row) for row in rows}


def test_the_page_has_the_table() -> None:
    match = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None and match[0] == table(), "run python -m tests.recipes --write"
