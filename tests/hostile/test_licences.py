"""What the quickstart installs is pinned, and its licences are listed and let it be used freely."""

import re
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.hostile.licences import LICENCES, LOCK, locked

FREE = re.compile(
    r"MIT|BSD|Apache|ISC|MPL|Mozilla|PSF|Python Software Foundation|Zlib|BSL|LLVM", re.IGNORECASE
)
DEVELOPMENT_ONLY = {"codespell"}
"""GPL; run by `make lint`, never imported and not shipped."""


PIN = re.compile(r"[\w.\-]+==[\w.!+]+(?: \\\n    --hash=sha256:[0-9a-f]{64})+")
"""A version and the hashes of its files, as `pip install --require-hashes` wants them."""


TE = [f"te/{path.name}" for path in (LOCK.parent / "te").iterdir()]
LOCKS = ["lock.txt", "run.txt", "torch-cpu.txt", "torch-cuda.txt", "gpu.txt", *TE]


@pytest.mark.parametrize("name", LOCKS)
def test_every_file_that_the_quickstart_installs_is_pinned_by_its_hash(name: str) -> None:
    text = (LOCK.parent / name).read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    entries = re.split(r"\n(?=\S)", text.rstrip("\n"))
    assert entries
    for entry in entries:
        assert PIN.fullmatch(entry), entry[:200]


def pins(name: str) -> set[str]:
    text = (LOCK.parent / name).read_text(encoding="utf-8")
    return set(re.findall(r"^(\S+==\S+)", text, flags=re.MULTILINE))


def test_a_container_and_the_demo_take_what_is_in_the_lock() -> None:
    assert len(pins("gpu.txt")) > 50
    assert pins("gpu.txt") | pins("run.txt") <= pins("lock.txt")


def test_the_demo_installs_all_that_a_run_and_its_report_need() -> None:
    needed = closure("megatron-snip", {"report"})
    named = {canonicalize_name(pin.split("==")[0]) for pin in pins("run.txt")}
    assert named == needed


def closure(name: str, extras: set[str]) -> set[str]:
    """The installed packages that a package needs, with theirs."""
    found: set[str] = set()
    todo = [(name, extras)]
    while todo:
        name, extras = todo.pop()
        for text in requires(name) or ():
            requirement = Requirement(text)
            marker = requirement.marker
            wanted = marker is None or any(marker.evaluate({"extra": e}) for e in {"", *extras})
            needed = canonicalize_name(requirement.name)
            if wanted and needed not in found:
                found.add(needed)
                todo.append((needed, requirement.extras))
    return found


def test_the_quickstart_takes_nothing_else() -> None:
    makefile = (LOCK.parents[1] / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split("\n$(RUN_STAMP):\n")[1].split("\n\n.PHONY")[0]
    assert "--require-hashes" in makefile.split("INSTALL_LOCKED :=")[1].split("\n")[0]
    assert recipe.count("$(INSTALL_LOCKED)") == 7
    (other,) = re.findall(r"\$\(PIP\) install.*", recipe)  # this very package
    assert "--no-deps --no-build-isolation -e .;" in other


def test_every_licence_is_listed_and_free() -> None:
    listed = dict(line.split(": ", 1) for line in LICENCES.read_text(encoding="utf-8").splitlines())
    assert sorted(listed) == sorted(locked()), "python -m tests.hostile.licences"
    odd = {name: text for name, text in listed.items() if not FREE.search(text)}
    assert set(odd) <= DEVELOPMENT_ONLY
