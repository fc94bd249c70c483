"""Compare pinned versions with a copy of PyPA's advisory database, where no service is reached.

    git clone https://github.com/pypa/advisory-database
    python requirements/advisories.py advisory-database

Prints how many packages and advisories were compared and every advisory that applies; exit status 1
if one does. It knows what the copy knows: an old copy says nothing of what came after it.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import Version

FILES = (
    "lock.txt",
    "torch-cpu.txt",
    "torch-cuda.txt",
    "gpu.txt",
    "megatron.txt",
    "bridge.txt",
    "te/*.txt",
)
PIN = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([^\s;\\]+)")


def pins(folder: Path) -> dict[str, set[str]]:
    """Return the versions that requirement files pin, by canonical name."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (path for name in FILES for path in folder.glob(name)):
        for line in path.read_text().splitlines():
            if match := PIN.match(line):
                found[canonicalize_name(match[1])].add(match[2])
    return found


def applies(affected: dict[str, Any], version: str) -> bool:
    """Whether an OSV `affected` entry (listed versions, or ranges of them) holds a version."""
    if version in affected.get("versions", ()):
        return True
    ranges = [r for r in affected.get("ranges", ()) if r["type"] == "ECOSYSTEM"]
    return any(_within(r["events"], Version(version)) for r in ranges)


def _within(events: list[dict[str, str]], version: Version) -> bool:
    inside = False
    for event in events:
        if "introduced" in event:
            start = event["introduced"]
            inside = inside or start == "0" or version >= Version(start)
        elif "fixed" in event:
            inside = inside and version < Version(event["fixed"])
        elif "last_affected" in event:
            inside = inside and version <= Version(event["last_affected"])
    return inside


def main(database: Path) -> int:
    """Print the comparison; 1 if an advisory applies, 2 if this is no copy of the database."""
    if not (database / "vulns").is_dir():
        print(f"{database} has no folder vulns: give a copy of pypa/advisory-database")
        return 2
    pinned, compared, found = pins(Path(__file__).parent), 0, 0
    for path in sorted(database.glob("vulns/*/*.yaml")):
        versions = pinned.get(canonicalize_name(path.parent.name))
        if versions is None:
            continue
        advisory, compared = yaml.safe_load(path.read_text()), compared + 1
        for version in sorted(versions):
            hit = any(applies(entry, version) for entry in advisory["affected"])
            if hit and "withdrawn" not in advisory:
                found += 1
                print(f"{path.parent.name} {version}: {advisory['id']}")
    print(f"{len(pinned)} packages, {compared} advisories about them, {found} apply")
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("one argument: the folder of a copy of pypa/advisory-database")
    sys.exit(main(Path(sys.argv[1])))
