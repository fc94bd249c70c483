"""Write lock.txt: what the venv holds, pinned, with the hash of every file that may be installed.

python requirements/lock.py        needs `uv` on PATH, and PyPI

lock.txt          every package of `make install`. A version's hashes are those of all its files
                  on PyPI: of other Pythons and other systems, too
torch-cpu.txt     torch without CUDA, which is not on PyPI: the wheel that the venv's pip finds
torch-cuda.txt    what PyPI's torch for Linux needs beside lock.txt: the CUDA libraries, and the
                  release of Triton that it was made with
run.txt, gpu.txt  the packages that they already name, as lock.txt has them
te/RELEASE.txt    releases of Transformer Engine, as far as they are Python
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PYPI = "https://pypi.org/simple"
PYTHON = "3.11"
LINUX = "x86_64-manylinux_2_28"

TORCHS_OWN = frozenset({"triton"})
"""torch.compile's code is for one release, which torch with CUDA names; torch without CUDA names
none, and lock.txt has a later one, whose compiler knows more GPUs."""

Hashes = dict[str, list[str]]
"""{requirement `name==version`: its files' `sha256:...`, sorted}."""


def run(*words: str) -> str:
    """Return what a command prints."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def installed() -> list[str]:
    """Return the venv's packages as `name==version`, without pip itself."""
    words = ("-m", "pip", "freeze", "--all", "--exclude-editable", "--exclude", "pip")
    return run(sys.executable, *words).splitlines()


def hashed(requirements: list[str], *options: str) -> Hashes:
    """Return the hashes of all files that PyPI has of the requirements, as uv resolves them."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.in"
        wanted.write_text("\n".join(requirements) + "\n")
        words = ("--generate-hashes", "--no-header", "--no-annotate", "--quiet")
        where = ("--index-url", PYPI, "--no-config", "--python-version", PYTHON)
        text = run("uv", "pip", "compile", str(wanted), *words, *where, *options)
    found: Hashes = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        pin, *hashes = re.sub(r"\\\n", "", entry).split(" --hash=")
        found[pin.split(";")[0].strip()] = sorted(value.strip() for value in hashes)
    return found


def chosen(requirement: str) -> str:
    """Return the hash of the file that pip installs here."""
    words = ("install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-")
    report = json.loads(run(sys.executable, "-m", "pip", *words, requirement))
    return "sha256:" + str(
        report["install"][0]["download_info"]["archive_info"]["hashes"]["sha256"]
    )


def name_of(requirement: str) -> str:
    """Return the normalized name."""
    return re.sub(r"[-_.]+", "-", requirement.split("==")[0]).lower()


def write(path: Path, pins: Hashes, head: str = "") -> None:
    """Write a requirements file for `pip install --require-hashes`, below comments."""
    lines = []
    for pin, hashes in pins.items():
        lines += [pin, *(f"    --hash={value}" for value in hashes)]
    text = "\n".join(lines).replace("\n    --hash", " \\\n    --hash")
    path.write_text(head + text + "\n")


def write_part(path: Path, pins: Hashes) -> None:
    """Write a requirements file's own packages anew, at these versions."""
    lines = path.read_text().splitlines(keepends=True)
    head = "".join(line for line in lines if line.startswith("#"))
    by_name = {name_of(pin): pin for pin in pins}
    names = [name_of(line) for line in lines if "==" in line and not line.startswith("#")]
    write(path, {by_name[name]: pins[by_name[name]] for name in names}, head)


def main() -> None:
    """Write them all."""
    here = installed()
    (torch,) = [pin for pin in here if name_of(pin) == "torch"]
    if torch.endswith("+cpu"):
        write(HERE / "torch-cpu.txt", {torch: [chosen(torch)]})
    pins = [pin.split("+")[0] for pin in here]
    on_pypi = {name_of(pin): hashes for pin, hashes in hashed(pins, "--no-deps").items()}
    locked = {pin: on_pypi[name_of(pin)] for pin in pins}
    write(HERE / "lock.txt", locked)
    for name in ("run.txt", "gpu.txt"):
        write_part(HERE / name, locked)
    with_cuda = hashed([torch.split("+")[0]], "--python-platform", LINUX)
    known = set(on_pypi) - TORCHS_OWN
    beside = {pin: hashes for pin, hashes in with_cuda.items() if name_of(pin) not in known}
    write(HERE / "torch-cuda.txt", beside)
    for path in (HERE / "te").glob("*.txt"):
        write(path, hashed([f"transformer-engine=={path.stem}"], "--no-deps"))


if __name__ == "__main__":
    main()
