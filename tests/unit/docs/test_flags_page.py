"""docs/flags.md is what the parsers give, and is complete."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from megatron_snip.cli.commands import COMMANDS
from megatron_snip.config import SnipConfig
from megatron_snip.flags import flag_name
from megatron_snip.trainer.fields import TrainFields
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


def test_every_setting_and_every_subcommand_is_on_it(flags_page: ModuleType) -> None:
    page = flags_page.page()
    for name in set(SnipConfig.model_fields) - {"enabled"}:
        assert f"| `{flag_name('snip-', name)}`" in page
    for name in TrainFields.model_fields:
        assert f"| `{flag_name('', name)}`" in page
    for command in COMMANDS:
        assert f"## megatron-snip {command}\n" in page


def test_all_rows_have_four_cells(flags_page: ModuleType) -> None:
    rows = [line for line in flags_page.page().splitlines() if line.startswith("|")]
    assert {line.replace(r"\|", "").count("|") for line in rows} == {5}
