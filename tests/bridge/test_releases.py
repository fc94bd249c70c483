"""Every patch on Megatron-Bridge: in the installed release, and in the source of older ones.

Older releases need older packages than the installed ones, so they are read and not imported. They
come unpacked, one folder each, below BRIDGE_RELEASES.
"""

import ast
import json
from pathlib import Path

import pytest

from megatron_snip.patches.install import MEGATRON_BRIDGE
from megatron_snip.patches.registry import Patch
from tests.bridge.releases import FOLDER, OF_BRIDGE
from tests.distributed.launch import RANK_ENVIRONMENT, TIMEOUT_S
from tests.processes import run_python

OLDER = ("0.3.1", "0.4.2", "0.5.1")
RECORD = Path(__file__).with_name("functions.json")
"""Parameters of the functions that SNIP wraps, of 0.6.2."""

PROBE = """
import inspect, json
from tests.bridge import script
from tests.bridge.releases import OF_BRIDGE
from megatron_snip.patches.install import MEGATRON_BRIDGE
found = {
    "problems": {p.target: p.problem() for p in MEGATRON_BRIDGE.patches},
    "parameters": {p.target: [*inspect.signature(p.find()[1]).parameters] for p in OF_BRIDGE},
}
print("PROBE" + json.dumps(found))
"""


def test_the_installed_release_has_every_function() -> None:
    done = run_python("-c", PROBE, timeout=TIMEOUT_S, **RANK_ENVIRONMENT)
    lines = [x for x in done.stdout.splitlines() if x.startswith("PROBE")]
    assert lines, done.stdout + done.stderr
    found = json.loads(lines[0].removeprefix("PROBE"))
    assert found["problems"] == {patch.target: None for patch in MEGATRON_BRIDGE.patches}
    assert found["parameters"] == json.loads(RECORD.read_text())


@pytest.mark.parametrize("release", OLDER)
@pytest.mark.parametrize("patch", OF_BRIDGE, ids=lambda patch: patch.target)
def test_an_older_release_defines_the_function_in_its_source(patch: Patch, release: str) -> None:
    folder = FOLDER / release
    if not folder.is_dir():
        pytest.skip(f"megatron-bridge {release} is not unpacked below {FOLDER}")
    module = folder / f"{patch.module.replace('.', '/')}.py"
    assert patch.attribute in names_in(module), f"{module} has no {patch.attribute}"
    defined = [
        names
        for file in (folder / "megatron" / "bridge" / "training").glob("*.py")
        if (names := parameters(file, patch.attribute))
    ]
    if defined:  # else it is Megatron-Core's
        assert any(set(patch.needs) <= names for names in defined)


def names_in(module: Path) -> set[str]:
    """Names that a module defines or imports at its top level."""
    found: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def parameters(module: Path, function: str) -> set[str]:
    """Parameters of a function that a module defines; none if it does not."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return set()
