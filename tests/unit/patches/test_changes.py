"""The registry of changes: nothing is replaced that it does not list."""

import ast
from pathlib import Path

import pytest

from megatron_snip.patches.changes import CHANGES, ON_INSTANCES, Change
from megatron_snip.patches.install import REGISTRY
from tests.processes import ROOT

SETTERS = {"setattr", "replace_attribute", "fast_setattr"}
"""Functions that set an attribute of something by its name."""

OWN = {
    "megatron_snip/output.py": "sys.stdout and sys.stderr of a command",
    "megatron_snip/linears/te/stored_weight.py:_copy": "a new tensor of SNIP's",
    "patches/registry.py": "the function that the others call",
    "patches/megatron_bridge/settings.py": "settings of a job without a GPU",
    "patches/megatron_bridge/loop.py:_counting_flops_once": "a counter of Bridge's, put back",
    "megatron_snip/trainer/checkpoint.py": "the demo's checkpoints",
    "patches/preflight/megatron_lm.py": "settings of a job that is not run",
    "patches/preflight/megatron_bridge.py": "settings of a job that is not run",
}
"""Places that set attributes and change no function of others, with what they set."""


def test_every_patch_is_listed_with_its_reason() -> None:
    targets = {target.replace(":", ".") for change in CHANGES for target in change.targets}
    assert {patch.target for patch in REGISTRY.patches} <= targets


def test_every_file_that_sets_attributes_of_others_is_listed() -> None:
    listed = {change.where for change in CHANGES}
    unlisted = [place for place in _setting_places() if place.partition(":")[0] not in listed]
    assert [p for p in unlisted if p not in OWN and p.partition(":")[0] not in OWN] == []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.targets[0])
def test_an_entry_says_where_why_and_until_when(change: Change) -> None:
    assert (ROOT / change.where).is_file()
    for text in (change.reason, change.upstream, change.releases, change.until):
        assert text.strip() == text != ""
    assert change.reason.endswith(".")


def test_what_is_found_names_what_is_missing() -> None:
    found = {change.targets: change.found() for change in CHANGES}
    assert found[("os:execv", "os:execve")] == "found"
    assert ON_INSTANCES in found.values()
    missing = Change(("os:no_such_call",), "x", "r.", "u", "never")
    assert "no no_such_call" in missing.found()


def _setting_places() -> set[str]:
    """Return `FILE:FUNCTION` of each call of SETTERS, and of each assignment to `__dict__`."""
    places = set()
    for folder in ("megatron_snip", "patches"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            for function in _functions(path):
                if any(map(_sets, ast.walk(function))):
                    places.add(f"{name}:{function.name}")
    return places


def _functions(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _sets(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name in SETTERS
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(
        isinstance(each, ast.Subscript)
        and isinstance(each.value, ast.Attribute)
        and each.value.attr == "__dict__"
        for each in targets
    )
