"""Patches are found by name and signature, installed once, and undone to the very objects."""

import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from megatron.core.rerun_state_machine import RerunStateMachine

from megatron_snip.errors import UnsupportedError
from megatron_snip.log import forget_warnings
from megatron_snip.patches.imports import when_imported
from megatron_snip.patches.install import CORE_PATCHES, MEGATRON_LM, REGISTRY, install_for
from megatron_snip.patches.registry import BRIDGE, CORE, Call, Package, Patch, Registry, Session

ALL = ("always", "--snip", "--cpu")
PATCHES = (*MEGATRON_LM.patches, *CORE_PATCHES)
ARGUMENTS = "megatron.training.arguments.add_megatron_arguments"
VALIDATION = "megatron.training.arguments.validate_args"
NEEDED = {p.target for p in PATCHES if p.handler is not None and not p.optional}
IN_THIS_RELEASE = {
    p.target
    for p in PATCHES
    if p.optional and p.module.startswith("megatron.core") and not p.problem()
}


@pytest.fixture
def registry(fake: Any) -> Registry:
    return Registry(PATCHES)


@pytest.fixture
def of_process(fake: Any) -> Iterator[Registry]:
    forget_warnings()
    yield REGISTRY
    REGISTRY.uninstall()


def functions(fake: Any) -> dict[str, Any]:
    modules = (fake.arguments, fake.training, fake.checkpointing, fake.global_vars)
    return {f"{m.__name__}.{k}": v for m in modules for k, v in vars(m).items() if callable(v)}


def test_uninstall_puts_back_the_very_objects(fake: Any, registry: Registry) -> None:
    before = functions(fake)
    registry.install(ALL)
    wrapped = [name for name, function in functions(fake).items() if function is not before[name]]
    assert len(wrapped) == len(NEEDED)
    assert fake.training.train_step.__name__ == "train_step"
    assert fake.training.train_step.__wrapped__ is before["megatron.training.training.train_step"]
    registry.session.controller = controller = Mock()
    registry.uninstall()
    assert functions(fake) == before
    controller.close.assert_called_once_with()
    registry.uninstall()  # nothing is left to undo


def test_a_wrapper_that_somebody_else_still_calls_does_nothing_once_uninstalled(
    fake: Any, registry: Registry
) -> None:
    seen: list[Session] = []
    fake.training.train_step = lambda model: model
    patch = Patch("megatron.training.training", "train_step", ())

    def handler(call: Call, session: Session) -> Any:
        seen.append(session)
        return call.run()

    registry = Registry([replace(patch, handler=handler)])
    registry.install(ALL)
    ours = fake.training.train_step
    fake.training.train_step = functools.wraps(ours)(lambda *args: ours(*args))
    registry.uninstall()
    registry.install(ALL)
    fake.training.train_step(None)
    assert seen == [registry.session]


def test_a_missing_function_is_one_error_and_changes_nothing(fake: Any, registry: Registry) -> None:
    del fake.training.train_step
    before = functions(fake)
    with pytest.raises(UnsupportedError) as error:
        registry.install(ALL)
    text = str(error.value)
    assert f"{CORE.version} has no megatron.training.training.train_step" in text
    assert "0.16" in text and "\n" not in text
    assert functions(fake) == before


def test_the_check_that_the_guard_replaces_is_needed(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(RerunStateMachine, "validate_result")
    with pytest.raises(UnsupportedError, match=r"has no .*RerunStateMachine\.validate_result"):
        registry.install(ALL)


def test_a_changed_signature_names_the_parameters(fake: Any, registry: Registry) -> None:
    fake.training.train_step = lambda data_iterator, model: None
    with pytest.raises(
        UnsupportedError,
        match=r"train_step\(data_iterator, model\) without forward_backward_func, iteration",
    ):
        registry.install(ALL)
    # A wrapper without `functools.wraps` hides what SNIP reads.
    fake.training.train_step = lambda *args, **kwargs: ({}, 0)
    with pytest.raises(UnsupportedError, match=r"train_step\(args, kwargs\) without forward_back"):
        registry.install(ALL)


def test_a_function_that_returns_too_little_is_named(fake: Any, registry: Registry) -> None:
    fake.training.train_step = lambda forward_backward_func, iteration: ({}, 0)
    registry.install(ALL)
    with pytest.raises(UnsupportedError, match="train_step that returns 2, not 6 items"):
        fake.training.train_step(None, 3)
    registry.uninstall()


def test_arguments_reach_the_original_as_they_were_passed() -> None:
    """Another tool that has wrapped the function may look for some by name."""

    def function(first: int, *rest: int, named: int = 0, **others: int) -> None:
        raise AssertionError

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def handler(call: Call, _: Session) -> Any:
        call.arguments["first"] += 10
        return call.run()

    patched = Patch("m", "f", (), handler=handler).wrapper(wrapped, Session())
    assert patched(1) == ((11,), {})
    assert patched(first=1, named=2) == ((), {"first": 11, "named": 2})
    assert patched(1, 2, 3, named=4, other=5) == ((11, 2, 3), {"named": 4, "other": 5})


def test_who_looks_for_a_module_or_fails_to_import_it_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[str] = []
    end = when_imported("watched", lambda: seen.append("imported"))
    assert importlib.util.find_spec("watched") is None
    (tmp_path / "watched.py").write_text("import no_such_module_of_anybody")
    importlib.invalidate_caches()
    assert importlib.util.find_spec("watched") is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("watched")
    assert seen == []
    (tmp_path / "watched.py").write_text("x = 'another length'")
    importlib.invalidate_caches()
    module = importlib.import_module("watched")
    monkeypatch.delitem(sys.modules, "watched")
    assert seen == ["imported"] and not isinstance(module.__loader__, type(end.__self__))
    end()
    importlib.import_module("watched")
    monkeypatch.delitem(sys.modules, "watched")
    assert seen == ["imported"]


def test_a_package_that_megatron_lacks_is_named(fake: Any, registry: Registry) -> None:
    patch = replace(MEGATRON_LM.patches[0], module="colorsys.no_module")
    assert "No module named" in (patch.problem() or "")
    assert "pip install 'megatron-snip[megatron]'" in (patch.problem() or "")


@pytest.mark.parametrize(
    ("package", "version", "tested"),
    [
        *[(CORE, v, True) for v in ("0.16.0", "0.16.1", "0.17.1", "0.19.2", "0.20.0rc1+local")],
        *[(CORE, v, False) for v in ("0.15.9", "0.21.0", "1.16.1")],
        *[(BRIDGE, v, True) for v in ("0.6.0", "0.6.2", "0.6.3rc0")],
        *[(BRIDGE, v, False) for v in ("0.5.1", "0.7.0")],
    ],
)
def test_pre_releases_of_tested_releases_count_as_tested(
    package: Package, version: str, tested: bool
) -> None:
    assert package.is_tested(version) == tested


def test_the_command_line_decides_what_is_installed(of_process: Registry) -> None:
    assert install_for(["--lr", "0.1"]) == ["--lr", "0.1"]
    assert of_process.installed == {ARGUMENTS, VALIDATION}
    for _ in range(2):  # a second call changes nothing
        words = ["--snip", "--lr", "0.1", "--snip-interval", "9", "model.seed=9"]
        assert install_for(words) == ["--lr", "0.1", "model.seed=9"]
        assert of_process.installed == NEEDED | IN_THIS_RELEASE
        assert of_process.session.given["interval"] == "9"


def test_a_missing_function_ends_a_script_in_one_line(
    fake: Any, of_process: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    del fake.training.train_step
    with pytest.raises(SystemExit) as end:
        install_for(["--snip"])
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert "no megatron.training.training.train_step" in text and text.count("\n") == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_flags_without_snip_warn_once_per_job(
    of_process: Registry,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
) -> None:
    monkeypatch.setenv("RANK", rank)
    install_for(["--snip-interval", "9", "--snip-plan-file", "p.json"])
    warning = "without --snip these flags have no effect: --snip-interval, --snip-plan-file"
    assert (warning in caplog.text) == (rank == "0")
    caplog.clear()
    install_for(["--snip-lag", "1", "--no-snip"])  # on purpose
    install_for(["--snip-lag", "1", "--snip"])
    assert caplog.text == ""
