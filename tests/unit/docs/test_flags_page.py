"""docs/flags.md is what the parsers give, and is complete."""

import importlib.util
from types import ModuleType

import pytest

from tests.unit.docs.commands import ROOT


@pytest.fixture(scope="module")
def flags_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flags_page", ROOT / "docs" / "flags_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(flags_page: ModuleType) -> None:
    stored = (ROOT / "docs" / "flags.md").read_text()
    assert flags_page.page() == stored, f"run: {flags_page.COMMAND}"
