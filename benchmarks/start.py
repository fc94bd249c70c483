"""Find a Python that can measure this machine's GPU, give it what it lacks, and start: bench-gpu.

    python3 benchmarks/start.py [ARGUMENTS OF benchmarks.gpu]

Imports nothing but the standard library. The first of $BENCH_PYTHON, .venv, .venv-gpu and the
Python that runs this whose torch sees the GPU is taken (an image's own, say); what our benchmarks
import and it does not have is installed beside it, into .venv-bench, and nothing of its own is
touched. If none sees the GPU, .venv-gpu is made, with PyPI's torch and its CUDA libraries. On a
machine without a GPU the benchmarks run in .venv, on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ROOT / ".venv-bench"
GPU_VENV = ROOT / ".venv-gpu"
PINS = ROOT / "requirements" / "gpu.txt"

NEEDED: dict[str, tuple[str, ...]] = {
    "numpy": ("numpy",),
    "rich": ("rich", "markdown-it-py", "mdurl", "Pygments"),
    "yaml": ("PyYAML",),
    "pydantic": (
        "pydantic",
        "pydantic_core",
        "annotated-types",
        "typing-inspection",
        "typing_extensions",
    ),
    "packaging": ("packaging",),
    "megatron.core": ("megatron-core",),
}
"""Module -> the distributions that bring it, in PINS."""

PROBE = """
import importlib.util, json, os, sysconfig
found = {"missing": []}
try:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    if torch.version.cuda:
        found["gpu"] = torch.cuda.get_device_name()
except Exception as error:
    found["why"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
for name in %r:
    try:
        there = importlib.util.find_spec(name)
    except ImportError:
        there = None
    if there is None:
        found["missing"].append(name)
found["headers"] = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Found:
    """What a Python is good for.

    Attributes:
        python: its command.
        gpu: the name of the GPU that its torch sees, or None.
        why: why it sees none.
        missing: modules of NEEDED that it cannot import.
        headers: whether it has Python.h, which Triton compiles its launchers with.
    """

    python: str
    gpu: str | None = None
    why: str = ""
    missing: tuple[str, ...] = ()
    headers: bool = True


def probe(python: str, extra: Path = BESIDE) -> Found:
    """Ask a Python what it can do, with what was installed beside it before."""
    try:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", PROBE % (list(NEEDED),)],
            env=environment(extra),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        told = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return Found(python, why=f"it does not run ({type(error).__name__})")
    why = told.get("why", "")
    if not why and not told.get("cuda"):
        why = f"its torch {told['torch']} is built without CUDA"
    missing, headers = tuple(told["missing"]), bool(told["headers"])
    return Found(python, told.get("gpu"), why, missing, headers)


def candidates(environ: Mapping[str, str]) -> list[str]:
    """Return the Pythons to ask, the likeliest first."""
    asked = environ.get("BENCH_PYTHON")
    if asked:
        return [asked]
    venvs = [ROOT / ".venv" / "bin" / "python", GPU_VENV / "bin" / "python"]
    return [*(str(python) for python in venvs if python.exists()), sys.executable]


def environment(extra: Path = BESIDE) -> dict[str, str]:
    """Return what the benchmarks run in: one thread, and what is installed beside a Python."""
    paths = [os.environ.get("PYTHONPATH", ""), str(extra)]
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def pins(modules: Iterable[str], text: str) -> list[str]:
    """Return `name==version` of every distribution that modules of NEEDED come from.

    Args:
        modules: names.
        text: of PINS.
    """
    known = {}
    for line in text.splitlines():
        if "==" in line and not line.startswith("#"):
            known[_plain(line.split("==")[0])] = line.split()[0]  # without its hashes
    return [known[_plain(name)] for module in modules for name in NEEDED[module]]


def give(found: Found) -> bool:
    """Install what a Python lacks beside it; say how to bring it where there is no network."""
    wanted = pins(found.missing, PINS.read_text())
    words = [found.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words += ["--no-deps", "--only-binary", ":all:", "--target", str(BESIDE), *wanted]
    print(f"{found.python} lacks {', '.join(found.missing)}; installing into {BESIDE.name}")
    if subprocess.run(words, check=False).returncode == 0:
        return True
    print(
        f"could not. Bring them as wheels: where there is a network\n"
        f"    pip download --no-deps --only-binary :all: --python-version X.Y {' '.join(wanted)}\n"
        f"and here\n    {found.python} -m pip install --no-index --no-deps --target "
        f"{BESIDE.name} *.whl"
    )
    return False


def make_gpu_venv() -> bool:
    """Make a venv whose torch has CUDA, from the lock."""
    print(f"making {GPU_VENV.name} with PyPI's torch and its CUDA libraries (3 GB)")
    python = str(GPU_VENV / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--require-hashes", "--only-binary", ":all:", "--no-deps", "-r"]
    steps = [[sys.executable, "-m", "venv", str(GPU_VENV)]]
    steps += [[*pip, str(ROOT / "requirements" / name)] for name in ("lock.txt", "torch-cuda.txt")]
    return all(subprocess.run(step, check=False).returncode == 0 for step in steps)


def choose(asked: Sequence[str]) -> Found | None:
    """Return the first Python that sees the GPU; say why each of the others does not."""
    for python in asked:
        found = probe(python)
        if found.gpu:
            return found
        print(f"{python} sees no GPU: {found.why}")
    return None


def main(arguments: Sequence[str]) -> int:
    """Choose, complete, start."""
    if not Path("/dev/nvidiactl").exists():
        return _on_the_cpu(arguments)
    found = choose(candidates(os.environ))
    if found is None and not os.environ.get("BENCH_PYTHON") and make_gpu_venv():
        found = choose([str(GPU_VENV / "bin" / "python")])
    if found is None:
        print("bench-gpu: name a Python whose torch sees the GPU: make bench-gpu BENCH_PYTHON=...")
        return 1
    if found.missing and not give(found):
        return 1
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "cc", "clang")))):
        print("there is no C compiler, without which Triton launches nothing: install gcc")
    if not found.headers:
        print(f"{found.python} has no Python.h, which Triton wants: install python3-dev")
    print(f"{found.python} sees {found.gpu}", flush=True)
    return _start(found.python, arguments)


def _on_the_cpu(arguments: Sequence[str]) -> int:
    print("there is no GPU (/dev/nvidiactl): less work, on the CPU", flush=True)
    python = os.environ.get("BENCH_PYTHON") or str(ROOT / ".venv" / "bin" / "python")
    if not Path(python).exists() and not shutil.which(python):
        print(f"bench-gpu: found no {python}; make install")
        return 1
    return _start(python, arguments)


def _start(python: str, arguments: Sequence[str]) -> int:
    words = [python, "-W", "ignore", "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(words, cwd=ROOT, env=environment(), check=False).returncode


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
