"""The licences of everything that requirements/lock.txt pins, as the distributions state them.

python -m tests.hostile.licences     writes requirements/licences.txt
"""

import importlib.metadata
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "lock.txt"
LICENCES = ROOT / "requirements" / "licences.txt"
STATED_ELSEWHERE = {"torchao": "BSD-3-Clause"}
"""In the licence file alone."""


def locked() -> list[str]:
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    return [line.split("==")[0] for line in lines if re.match(r"[A-Za-z0-9]", line)]


def licence(name: str) -> str:
    """Return what an installed distribution says of its licence, in one line."""
    metadata = importlib.metadata.metadata(name)
    expression = metadata.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = metadata.get_all("Classifier") or []
    named = [c.split("::")[-1].strip() for c in classifiers if c.startswith("License ::")]
    stated = (metadata.get("License") or "").strip().splitlines()
    return "; ".join(named) or (stated[0] if stated else STATED_ELSEWHERE.get(name, "unknown"))


def main() -> None:
    text = "".join(f"{name}: {licence(name)}\n" for name in locked())
    LICENCES.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
