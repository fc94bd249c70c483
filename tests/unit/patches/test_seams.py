"""What a command line installs, in the process and by `import megatron_snip.auto`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from megatron_snip.errors import UnsupportedError
from megatron_snip.log import forget_warnings
from megatron_snip.patches import cpu, target
from megatron_snip.patches.seams import REGISTRY, SEAMS, install_for
from tests.unit.patches.fake_megatron import FakeMegatron


@pytest.fixture(autouse=True)
def undone(fake: FakeMegatron) -> Iterator[None]:
    yield
    REGISTRY.uninstall()


def installed() -> set[str]:
    return {seam.name for seam in SEAMS if REGISTRY.state(seam).word == "installed"}


def test_names_are_unique_and_targets_too() -> None:
    assert len({seam.name for seam in SEAMS}) == len(SEAMS)
    assert len({str(seam.target) for seam in SEAMS}) == len(SEAMS)


def test_without_the_flag_only_the_parser() -> None:
    install_for(["--lr", "0.1"])
    assert installed() == {"arguments"}


NEEDED = {seam.name for seam in SEAMS if seam.when != "--cpu" and not seam.optional}


def test_flags_without_the_flag_are_told(caplog: pytest.LogCaptureFixture) -> None:
    forget_warnings()
    install_for(["--snip-interval", "9", "--snip-plan", "p.json"])
    assert "without --snip these have no effect: --snip-interval, --snip-plan-file" in caplog.text
    caplog.clear()
    install_for(["--snip-lag", "1", "--no-snip"])  # they know
    install_for(["--snip-lag", "1", "--snip"])
    assert caplog.text == ""


def test_with_the_flag_all_that_snip_needs() -> None:
    install_for(["--lr", "0.1", "--snip", "--snip-interval", "9"])
    assert installed() == NEEDED
    assert REGISTRY.session.given["snip_interval"] == "9"
    install_for(["--lr", "0.1", "--snip"])  # again does no harm
    assert installed() == NEEDED


def test_releases_before_0_18_validate_by_a_name_of_their_own(
    fake: FakeMegatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    initialize = fake.add_initialize(monkeypatch)
    original = initialize.validate_args
    install_for(["--snip"])
    assert installed() == NEEDED | {"validation-initialize"}
    assert initialize.validate_args is not original
    REGISTRY.uninstall()
    assert initialize.validate_args is original is fake.arguments.validate_args


def test_the_import_reads_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--snip"])
    monkeypatch.delitem(sys.modules, "megatron_snip.auto", raising=False)
    importlib.import_module("megatron_snip.auto")
    assert "train-step" in installed()


def test_a_strict_user_refuses_unknown_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "core_version", lambda: "0.25.0")
    with pytest.raises(UnsupportedError, match=r"0\.25\.0 was not tested"):
        install_for(["--snip", "--snip-strict-version"])
    assert installed() == set()
    install_for(["--snip"])
    assert "train-step" in installed()


def test_cuda_kernels_are_left_unbuilt_on_a_cpu(
    fake: FakeMegatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.16 builds them with nvcc at every start."""
    kernels = fake.add_legacy_kernels(monkeypatch)
    install_for([])
    with pytest.raises(FileNotFoundError):
        kernels.load("args")
    monkeypatch.setattr(cpu, "is_installed", lambda: True)
    install_for([])
    assert kernels.load("args") is None
    assert "fused-kernels" in installed()
