"""Start the benchmarks of a GPU on a machine without a network, and pack what they need for it.

    python3 benchmarks/start.py --bundle FILE                    here, with a network
    sh FILE [ARGUMENTS OF benchmarks.gpu]                        there; again until nothing is left
    python3 benchmarks/start.py [ARGUMENTS OF benchmarks.gpu]    the same in a checkout

Imports nothing but the standard library. The first of $BENCH_PYTHON, .venv and the Python that
runs this whose torch sees the GPU is taken. What it lacks is installed into .venv-bench, from
wheels/ if that exists, and is checked against the hashes of requirements/gpu.txt; nothing of its
own is touched. Without a GPU the benchmarks do less work, on the CPU.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ROOT / ".venv-bench"
WHEELS = ROOT / "wheels"
PINS = ROOT / "requirements" / "gpu.txt"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")

BROUGHT = (
    "megatron-core",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",
    "ortools",
    "immutabledict",
    "absl-py",
    "protobuf",
)
"""Distributions that a machine for PyTorch rarely has, in PINS; the last four make plans."""

PROBE = """
import importlib, json, os, sysconfig
found = {"missing": []}
try:
    import torch
    found["torch"] = torch.__version__
    found["why"] = "" if torch.version.cuda else f"its torch {torch.__version__} has no CUDA"
    if torch.version.cuda:
        found["gpu"] = torch.cuda.get_device_name()
except Exception as error:
    found["why"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
for name in ("megatron.core", "pydantic", "ortools.sat", "numpy", "rich", "yaml", "packaging"):
    try:
        importlib.import_module(name)
    except Exception:
        found["missing"].append(name)
found["headers"] = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
print(json.dumps(found))
"""

UNPACK = """#!/bin/sh
# Unpacks megatron-snip with its wheels and runs benchmarks.gpu; run it again to go on.
set -eu
home="${SNIP_BENCH_DIR:-$PWD/megatron-snip-gpu}"
sum=@SUM@
if [ "$(cat "$home/.bundle" 2>/dev/null)" != "$sum" ]; then
  rm -rf "$home" && mkdir -p "$home"
  tail -n +@LINE@ "$0" >"$home/bundle.tar.gz"
  echo "$sum  $home/bundle.tar.gz" | sha256sum --check --quiet
  tar -xzf "$home/bundle.tar.gz" -C "$home" && rm "$home/bundle.tar.gz"
  echo "$sum" >"$home/.bundle"
fi
exec "${BENCH_PYTHON:-python3}" "$home/benchmarks/start.py" "$@"
"""


def requirements(text: str) -> str:
    """Return the lines of PINS, with hashes, for what is brought."""
    blocks = re.split(r"(?m)^(?=\S)", text)
    wanted = {name.lower() for name in BROUGHT}
    return "".join(b for b in blocks if b.split("==")[0].lower() in wanted)


def bundle(file: Path) -> int:
    """Write a shell script that holds the last commit, the wheels and their hashes."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "--short=10", "HEAD"], text=True)
    with tempfile.TemporaryDirectory() as folder:
        archive, wheels = Path(folder, "bundle.tar"), Path(folder, "wheels")
        subprocess.run([*git, "archive", "--output", str(archive), "HEAD"], check=True)
        pins = Path(folder, "requirements.txt")
        pins.write_text(requirements(PINS.read_text()))
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        words += ["--only-binary", ":all:", "--require-hashes", "--requirement", str(pins)]
        words += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(wheels)]
        for platform in PLATFORMS:
            words += ["--platform", platform]
        subprocess.run(words, check=True)
        with tarfile.open(archive, "a") as tar:
            tar.add(wheels, "wheels")
            entry = tarfile.TarInfo("COMMIT")
            entry.size = len(commit)
            tar.addfile(entry, io.BytesIO(commit.encode()))
        subprocess.run(["gzip", "--best", str(archive)], check=True)
        payload = Path(folder, "bundle.tar.gz").read_bytes()
    head = UNPACK.replace("@SUM@", hashlib.sha256(payload).hexdigest())
    head = head.replace("@LINE@", str(head.count("\n") + 1))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(head.encode() + payload)
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, for Python 3.12. There: sh {file.name}")
    return 0


def probe(python: str) -> dict[str, Any]:
    """Ask a Python what it can do, with what was installed beside it before."""
    try:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", PROBE],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return {"why": f"it does not run ({type(error).__name__})", "missing": [], "headers": True}
    return found


def environment() -> dict[str, str]:
    """Return what the benchmarks run in: one thread, and what is installed beside a Python."""
    paths = [os.environ.get("PYTHONPATH", ""), str(BESIDE)]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": ":".join(filter(None, paths))}


def install(python: str, missing: Sequence[str]) -> bool:
    """Install what is brought beside a Python, each file checked against its hash."""
    print(f"{python} lacks {', '.join(missing)}; installing into {BESIDE}", flush=True)
    BESIDE.mkdir(exist_ok=True)
    pins = BESIDE / "requirements.txt"
    pins.write_text(requirements(PINS.read_text()))
    words = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--only-binary", ":all:", "--require-hashes", "--target", str(BESIDE), "--upgrade"]
    if WHEELS.is_dir():
        words += ["--no-index", "--find-links", str(WHEELS)]
    return subprocess.run([*words, "--requirement", str(pins)], check=False).returncode == 0


def choose(gpu: bool) -> tuple[str, dict[str, Any]] | None:
    """Return the first Python that sees the GPU (on the CPU: the first that has torch)."""
    asked = os.environ.get("BENCH_PYTHON")
    venv = ROOT / ".venv" / "bin" / "python"
    for python in [asked] if asked else [*([str(venv)] if venv.exists() else []), sys.executable]:
        found = probe(python)
        if found.get("gpu" if gpu else "torch"):
            return python, found
        print(f"{python} {'sees no GPU' if gpu else 'has no torch'}: {found['why']}")
    return None


def main(arguments: Sequence[str]) -> int:
    """Choose, complete, start."""
    if arguments[:1] == ["--bundle"]:
        return bundle(Path(arguments[1]))
    gpu = Path("/dev/nvidiactl").exists()
    chosen = choose(gpu)
    if chosen is None:
        print("bench-gpu: name a Python that has torch: make bench-gpu BENCH_PYTHON=...")
        return 1
    python, found = chosen
    if found["missing"]:
        if not install(python, found["missing"]):
            return 1
        if found := probe(python)["missing"]:
            print(f"bench-gpu: {python} still lacks {', '.join(found)}; install it there")
            return 1
        return main(arguments)
    if gpu and not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "cc", "clang")))):
        print("there is no C compiler, without which Triton launches nothing: install gcc")
    if gpu and not found["headers"]:
        print(f"{python} has no Python.h, which Triton needs: install python3-dev")
    print(f"{python} sees {found['gpu']}" if gpu else "no GPU: less work, on the CPU", flush=True)
    words = [python, "-W", "ignore", "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(words, cwd=ROOT, env=environment(), check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
