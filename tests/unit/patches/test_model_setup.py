"""Setup: settings are checked before the model is built; bad input is one line and status 2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_snip.errors import UsageError
from megatron_snip.patches import attach, model_setup
from megatron_snip.patches.registry import Registry
from megatron_snip.topology import Topology
from tests.unit.patches.fake_megatron import FakeController, FakeMegatron


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def note(session: Any, config: Any, args: Any, model: Any, optimizer: Any) -> None:
        calls.append((config, model, optimizer))

    monkeypatch.setattr(attach, "attach", note)
    return calls


def test_the_controller_is_attached_to_what_megatron_built(
    fake: FakeMegatron, attached: list[Any]
) -> None:
    registry = Registry([model_setup.SEAM])
    registry.install({"--snip"})
    fake.args.snip_enabled = True
    result = fake.training.setup_model_and_optimizer("gpt", cfg_container="container")
    assert result == (["model"], "optimizer", "scheduler")
    assert fake.calls == [("setup", ("gpt",), {"cfg_container": "container"})]
    ((config, model, optimizer),) = attached
    assert config.enabled and model == ["model"] and optimizer == "optimizer"


def test_without_snip_nothing_is_attached(fake: FakeMegatron, attached: list[Any]) -> None:
    Registry([model_setup.SEAM]).install({"--snip"})
    fake.training.setup_model_and_optimizer("gpt")
    assert attached == []


def test_a_run_before_in_the_process_is_ended(fake: FakeMegatron, attached: list[Any]) -> None:
    registry = Registry([model_setup.SEAM])
    registry.install({"--snip"})
    controller: Any = FakeController()
    registry.session.controller = controller
    registry.session.loaded = {"version": 1}
    fake.training.setup_model_and_optimizer("gpt")
    assert controller.told == ["closed"]
    assert registry.session.controller is None and registry.session.loaded is None


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"snip_interval": "often"}, "--snip-interval"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
    ],
)
def test_bad_input_ends_before_the_model_is_built(
    fake: FakeMegatron,
    attached: list[Any],
    capsys: pytest.CaptureFixture[str],
    setting: dict[str, Any],
    named: str,
) -> None:
    Registry([model_setup.SEAM]).install({"--snip"})
    vars(fake.args).update(snip_enabled=True, **setting)
    with pytest.raises(SystemExit) as end:
        fake.training.setup_model_and_optimizer("gpt")
    assert end.value.code == 2
    assert fake.calls == [] and attached == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("megatron-snip: error: ") and named in lines[0]


def test_one_rank_of_a_host_speaks(
    fake: FakeMegatron, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Registry([model_setup.SEAM]).install({"--snip"})
    monkeypatch.setenv("LOCAL_RANK", "1")
    vars(fake.args).update(snip_enabled=True, snip_interval="often")
    with pytest.raises(SystemExit):
        fake.training.setup_model_and_optimizer("gpt")
    assert capsys.readouterr().err == ""


# What attach makes of a loaded checkpoint.

PLAN = {
    "version": 1,
    "step": 2,
    "policy": "snip",
    "status": "optimal",
    "objective": 0.5,
    "bound": 0.5,
    "seconds": 0.1,
    "target": 0.5,
    "efficiency": 1.0,
    "stages": [1.0],
    "linears": {},
    "digest": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
}
STATE = {"version": 1, "step": 7, "plan": PLAN, "history": [], "refreshed": 6, "pending": None}


def resumed(loaded: Any, iteration: int) -> Any:
    return attach._resumed_state(loaded, SimpleNamespace(iteration=iteration), Topology())


def test_a_checkpoints_state_goes_on() -> None:
    state = resumed(STATE, 7)
    assert state.step == 7 and state.refreshed == 6 and state.plan.iteration == 2


def test_a_fresh_run_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    assert resumed(None, 0) is None
    assert caplog.text == ""


def test_a_checkpoint_without_state_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert resumed(None, 7) is None
    assert "iteration 7 has no SNIP state" in caplog.text


def test_another_iteration_keeps_the_plan_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Megatron can rewind its data loader (--override-ckpt-iteration)."""
    state = resumed(STATE, 3)
    assert state.step == 3 and state.refreshed is None and state.plan.iteration == 2
    assert "a refresh in flight is dropped" in caplog.text


def test_damaged_state_is_refused() -> None:
    with pytest.raises(UsageError, match="SNIP state of the checkpoint"):
        resumed({"version": 2}, 7)
