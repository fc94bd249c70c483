"""What the quickstart installs is pinned, and its licences are listed and let it be used freely."""

import re

import pytest

from tests.hostile.licences import LICENCES, LOCK, locked

FREE = re.compile(
    r"MIT|BSD|Apache|ISC|MPL|Mozilla|PSF|Python Software Foundation|Zlib|BSL|LLVM", re.IGNORECASE
)
DEVELOPMENT_ONLY = {"codespell"}
"""GPL; run by `make lint`, never imported and not shipped."""


PIN = re.compile(r"[\w.\-]+==[\w.!+]+(?: \\\n    --hash=sha256:[0-9a-f]{64})+")
"""A version and the hashes of its files, as `pip install --require-hashes` wants them."""


TE = [f"te/{path.name}" for path in (LOCK.parent / "te").iterdir()]


@pytest.mark.parametrize("name", ["lock.txt", "torch-cpu.txt", "torch-cuda.txt", "gpu.txt", *TE])
def test_every_file_that_the_quickstart_installs_is_pinned_by_its_hash(name: str) -> None:
    text = (LOCK.parent / name).read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    entries = re.split(r"\n(?=\S)", text.rstrip("\n"))
    assert entries
    for entry in entries:
        assert PIN.fullmatch(entry), entry[:200]


def test_a_container_takes_what_is_in_the_lock() -> None:
    lock, part = (
        set(re.findall(r"^(\S+==\S+)", (LOCK.parent / name).read_text(), flags=re.MULTILINE))
        for name in ("lock.txt", "gpu.txt")
    )
    assert len(part) > 50 and part <= lock


def test_the_quickstart_takes_nothing_else() -> None:
    makefile = (LOCK.parents[1] / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split("\n$(STAMP):\n")[1].split("\n\n")[0]
    assert "--require-hashes" in makefile.split("INSTALL_LOCKED :=")[1].split("\n")[0]
    assert recipe.count("$(INSTALL_LOCKED)") == 4
    (other,) = re.findall(r"\$\(PIP\) install.*", recipe)  # this very package
    assert other.endswith("--no-deps --no-build-isolation -e .")


def test_every_licence_is_listed_and_free() -> None:
    listed = dict(line.split(": ", 1) for line in LICENCES.read_text(encoding="utf-8").splitlines())
    assert sorted(listed) == sorted(locked()), "python -m tests.hostile.licences"
    odd = {name: text for name, text in listed.items() if not FREE.search(text)}
    assert set(odd) <= DEVELOPMENT_ONLY
