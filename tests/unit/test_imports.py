"""Packages import only from their left, and only those that may touch Megatron do."""

import ast
import functools
import importlib.util
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_snip"

ORDER: tuple[tuple[str, ...], ...] = (
    ("version",),
    ("errors",),
    ("log",),
    ("files", "flags", "formats", "plugins", "types"),
    ("options", "output"),
    ("alert_thresholds", "target_schedule"),
    ("config", "directory", "directory_lease", "matmul"),
    ("rank_tree",),
    ("collectives",),
    ("topology",),
    ("kernels",),
    ("quantizers",),
    ("statistics",),
    ("planning",),
    ("divergence",),  # it writes planning's record of a problem
    ("reporting",),  # reads the records of what is left of it
    ("linears",),
    ("run",),
    ("patches",),
    ("trainer",),
    ("cli",),
    ("__init__", "__main__", "auto", "bridge"),
)
"""Left to right; packages of one line do not know each other."""
RANK = {package: rank for rank, packages in enumerate(ORDER) for package in packages}
WITHOUT_TORCH = {"version", "errors", "log", "formats", "types", "options", "config", "flags"}
WITHOUT_TORCH |= {"planning"}


def sources() -> Iterator[tuple[str, Path]]:
    """(package or module, file) of every source file; two packages lie beside the others."""
    for entry in sorted([*PACKAGE.iterdir(), ROOT / "kernels", ROOT / "patches"]):
        if entry.is_dir():
            files = sorted(entry.rglob("*.py"))
            yield from ((entry.name, file) for file in files if "__pycache__" not in file.parts)
        elif entry.suffix == ".py":
            yield entry.stem, entry


def imported(file: Path) -> Iterator[str]:
    """Dotted names of all imports in a file, those inside of functions included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from names_of(node)


def names_of(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Dotted names of what a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0, "a relative import"
    assert node.module is not None
    if node.module == "megatron_snip":
        yield from (f"megatron_snip.{alias.name}" for alias in node.names)
    else:
        yield node.module


@pytest.fixture(scope="module")
def graph() -> dict[tuple[str, str], set[str]]:
    """{(package, imported top-level package or package): files}."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for package, file in sources():
        for name in imported(file):
            first, _, rest = name.partition(".")
            target = f"megatron_snip.{rest.split('.')[0]}" if first == "megatron_snip" else first
            found[package, target].add(file.name)
    return found


def test_every_package_has_its_place() -> None:
    packages = {package for package, _ in sources()}
    assert packages == set(RANK)
    assert {"statistics", "kernels", "patches", "run"} < packages


def test_packages_import_only_from_their_left(graph: dict[tuple[str, str], set[str]]) -> None:
    wrong = {}
    for (package, target), files in graph.items():
        first, _, name = target.partition(".")
        is_ours = first == "megatron_snip" and name in RANK and name != package
        if is_ours and RANK[name] >= RANK[package]:
            wrong[f"{package} imports {name}"] = sorted(files)
    assert wrong == {}


def test_torch_megatron_and_the_solver_stay_where_they_are(
    graph: dict[tuple[str, str], set[str]],
) -> None:
    users = {name: {p for p, target in graph if target == name} for _, name in graph}
    assert {"linears"} <= users["megatron"] <= {"linears", "run", "patches", "trainer"}
    assert users["torch"].isdisjoint(WITHOUT_TORCH)
    assert users["ortools"] == {"planning"}


def test_the_solver_is_loaded_where_it_solves() -> None:
    """Ranks import `planning` and solve nothing: OR-Tools would take memory and time in each."""
    at_the_top = {
        f"{file.name}: {name}"
        for _, file in sources()
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in names_of(node)
    }
    assert not [text for text in at_the_top if ": ortools" in text]
    assert any(text.endswith(": torch") for text in at_the_top)


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        *[(name, True) for name in ("kernels", "patches", "patches.cpu", "run")],
        *[(name, False) for name in ("megatron_snip", "tests", "benchmarks", "setup")],
    ],
)
def test_a_checkout_holds_the_package_and_nothing_else(name: str, is_there: bool) -> None:
    assert (importlib.util.find_spec(f"megatron_snip.{name}") is not None) == is_there


def test_names_that_slow_tests_and_benchmarks_import_exist() -> None:
    """Most of them need a machine or packages that this tier does not have."""
    missing = []
    for file in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            first, *rest = node.module.split(".")
            if first not in ("tests", "benchmarks", "megatron_snip"):
                continue
            beside = rest[:1] in (["kernels"], ["patches"])
            path = ROOT.joinpath(*rest) if beside else ROOT.joinpath(first, *rest)
            known = {each.stem for each in path.glob("*")} if path.is_dir() else set()
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if source.exists():
                known |= defined(source)
            wanted = {alias.name for alias in node.names} - known
            missing += [f"{file.relative_to(ROOT)}: {node.module}.{name}" for name in wanted]
    assert missing == []


def test_a_script_decides_which_megatron_is_imported() -> None:
    """It may put a checkout first on the path before it imports Megatron."""
    code = (
        "import sys; from megatron_snip.patches.install import install_for; install_for(['--snip'])"
        "; sys.exit('megatron' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


ORDINARY_RANK = """
import sys
from argparse import Namespace
from megatron_snip.config import SnipConfig
from megatron_snip.linears.discovery import current_topology
from megatron_snip.patches.attach import make_writers
from megatron_snip.reporting.background import in_background
from megatron_snip.run.controller import SnipController
from megatron_snip.topology import Topology

class RankZeroIsElsewhere:
    def on_rank_0(self, what, action):
        return "the run"

topology = Topology(rank=1, world_size=3, control=RankZeroIsElsewhere())
assert make_writers(SnipConfig(), Namespace(), topology, None) == ([], "the run")
wanted = "rich matplotlib ortools megatron_snip.reporting.opening megatron_snip.reporting.writers"
print(*(name for name in wanted.split() if name in sys.modules))
"""


def test_a_rank_that_writes_nothing_imports_no_writers() -> None:
    """16,384 ranks read modules from one file system."""
    command = [sys.executable, "-W", "ignore", "-c", ORDINARY_RANK]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert found.stdout.split() == []


def test_no_test_module_imports_from_another() -> None:
    """What several share is in a module that is named after it."""
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in ROOT.glob("tests/**/*.py")
        for name in imported(file)
        if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
    }
    assert found == set()


@functools.cache
def defined(file: Path) -> set[str]:
    """Names that a module assigns, defines or imports at its top level."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found
