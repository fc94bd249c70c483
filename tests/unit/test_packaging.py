"""sdist, wheel, editable install and checkout have the same modules and run from any directory."""

import ast
import json
import shutil
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from megatron_snip.planning.problem import write_problem
from megatron_snip.version import __version__
from tests.processes import ROOT, run_python
from tests.unit.planning.build import problem_of

BESIDE = ("kernels", "patches")
"""Folders of the repository that are subpackages of `megatron_snip`."""


def package_files() -> dict[str, str]:
    """Every file of the package: its path in an installation, and in the repository."""
    folders = {"megatron_snip": "megatron_snip"} | {f"megatron_snip/{n}": n for n in BESIDE}
    return {
        f"{installed}/{path.relative_to(ROOT / folder)}": str(path.relative_to(ROOT))
        for installed, folder in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def build(folder: Path, what: str, into: Path) -> Path:
    """Build a distribution of the sources in `folder`."""
    into.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{what}({str(into)!r})"
    done = run_python("-c", code, cwd=folder, PYTHONPATH="")
    assert done.returncode == 0, done.stderr[-3000:]
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packaging reads, so that nothing is written into the checkout."""
    copy = tmp_path_factory.mktemp("sources") / "megatron-snip"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(ROOT, copy, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def sdist(sources: Path) -> Path:
    return build(sources, "sdist", sources.parent / "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Made from the sdist, as package indexes' users may have to."""
    folder = sdist.parent.parent / "unpacked"
    with tarfile.open(sdist) as archive:
        # `filter` came with 3.11.4; the archive is our own.
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **safe)
    (unpacked,) = folder.iterdir()
    return build(unpacked, "wheel", folder / "wheel")


def install(wheel: Path, folder: Path) -> Path:
    words = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder, wheel]
    done = run_python(*words)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """The wheel, installed in a folder of its own."""
    return install(wheel, wheel.parent.parent / "site")


def test_the_sdist_holds_every_file(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.split("/", 1)[1] for member in members if member.isfile()}
    assert set(package_files().values()) <= names
    assert not any(member.issym() or member.islnk() for member in members)
    assert {"LICENSE", "README.md", "configs/demo.yaml", "launch/slurm.sbatch"} <= names


def test_the_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == set(package_files())
    assert {"megatron_snip/py.typed", "megatron_snip/kernels/quantize.py"} <= names
    assert "megatron_snip/patches/cpu/tensors.py" in names


def test_it_runs_from_outside_the_repository(site: Path, tmp_path: Path) -> None:
    command = str(site / "bin" / "megatron-snip")
    outside = {"cwd": tmp_path, "PYTHONPATH": str(site)}
    assert run_python(command, "--version", **outside).stdout.split()[-1] == __version__
    write_problem(problem_of([[0.0, 1.0], [0.0, 2.0]]), tmp_path / "problem.json")
    words = ["plan", "problem.json", "--output", "plan.json"]
    done = run_python(command, *words, **outside)
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())["linears"]
    assert [option["fprop"] for option in plan.values()] == ["fp4", "fp8"]


def modules(folder: Path, path: Path, editable: bool = False) -> dict[str, Path]:
    """Where Python finds every module of the package, with `path` on its search path."""
    names = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
        for name in package_files()
        if name.endswith(".py")
    }
    code = f"""
import importlib.util, json, site, sys
from importlib.machinery import PathFinder

def spec_of(name):  # without importing what is above, which may import torch
    parent = name.rpartition(".")[0]
    if parent in ("", "megatron_snip"):
        return importlib.util.find_spec(name)
    return PathFinder.find_spec(name, spec_of(parent).submodule_search_locations)

if {editable}:  # started without site-packages, which may hold an editable install already
    site.addsitedir({str(path)!r})
    sys.path.append({sysconfig.get_path("purelib")!r})
print(json.dumps({{n: spec_of(n).origin for n in {list(names)!r}}}))
"""
    first = folder if editable else path
    flag = "-S" if editable else "-P"
    done = run_python(flag, "-c", code, cwd=folder, PYTHONPATH=str(first))
    assert done.returncode == 0, done.stderr[-2000:]
    return {names[name]: Path(origin) for name, origin in json.loads(done.stdout).items()}


def test_editable_install_and_checkout_have_the_wheels_modules(
    sources: Path, tmp_path: Path
) -> None:
    files = {name: at for name, at in package_files().items() if name.endswith(".py")}
    assert modules(tmp_path, ROOT) == {name: ROOT / at for name, at in files.items()}
    editable = install(build(sources, "editable", tmp_path / "editable"), tmp_path / "site")
    found = modules(tmp_path, editable, editable=True)
    assert found == {name: sources / at for name, at in files.items()}


def test_the_extra_megatron_has_what_megatron_imports_without_a_gpu() -> None:
    """`megatron.training` 0.16 imports this module of Megatron-Core, and torch alone does not."""
    module = "megatron/core/transformer/custom_layers/batch_invariant_kernels.py"
    source = Path(str(distribution("megatron-core").locate_file(module)))
    imported = {
        name.name.partition(".")[0]
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import)
        for name in node.names
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["megatron"]]
    names = {Requirement(each).name for each in required}
    assert imported - sys.stdlib_module_names <= names
