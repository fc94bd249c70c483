"""Runs the launch scripts with an environment of their own; a cluster's commands are stand-ins."""

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

LAUNCH = Path(__file__).parents[3] / "launch"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def run_script(
    name: str, *words: str, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `bash launch/NAME WORDS` in `folder`, where `folder/bin` comes first on PATH."""
    variables = {"PATH": f"{folder / 'bin'}:{SYSTEM_PATH}", **(environment or {})}
    return subprocess.run(
        ["bash", str(LAUNCH / name), *words],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
    )


def commands(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """Return the commands that a dry run has printed, as a shell would read them."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    return [shlex.split(line) for line in lines]


def stand_in(folder: Path, name: str, body: str) -> None:
    """Put a script called `name` on the PATH of `run_script`."""
    (folder / "bin").mkdir(exist_ok=True)
    file = folder / "bin" / name
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)


def flag(words: list[str], name: str) -> str:
    """Return the word after a flag."""
    return words[words.index(name) + 1]
