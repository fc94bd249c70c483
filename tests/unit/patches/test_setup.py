"""From Megatron's settings and model to a controller; bad input is one line and status 2."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.patches import setup
from megatron_snip.patches.registry import Registry
from megatron_snip.patches.setup import make_writers, resumed_state
from megatron_snip.state import ControllerState
from megatron_snip.topology import Topology
from tests.unit.patches.fake_megatron import FakeMegatron
from tests.unit.planning.build import plan_of


@pytest.fixture
def attached(fake: FakeMegatron, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(setup, "attach", lambda *args: calls.append(args))
    Registry([setup.validation, setup.model_setup]).install({"--snip"})
    return calls


def test_a_controller_is_attached_to_what_megatron_built(
    fake: FakeMegatron, attached: list[Any]
) -> None:
    assert fake.arguments.validate_args(fake.args, {}) is fake.args
    fake.training.setup_model_and_optimizer("gpt")
    assert attached == []  # without --snip
    fake.calls.clear()
    fake.args.snip_enabled = True
    result = fake.training.setup_model_and_optimizer("gpt", cfg_container="container")
    assert result == (["model"], "optimizer", "scheduler")
    assert fake.calls == [("setup", ("gpt",), {"cfg_container": "container"})]
    ((_, config, _, model, optimizer),) = attached
    assert config.enabled and model == ["model"] and optimizer == "optimizer"


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"snip_interval": "often"}, "--snip-interval: "),
        ({"use_torch_fsdp2": True}, "--snip cannot run with --use-megatron-fsdp"),
    ],
)
def test_bad_input_ends_once_per_host_before_the_model_is_built(
    fake: FakeMegatron,
    attached: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    setting: dict[str, Any],
    named: str,
    rank: str,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    vars(fake.args).update(snip_enabled=True, **setting)
    for call in (
        lambda: fake.arguments.validate_args(args=fake.args),
        lambda: fake.training.setup_model_and_optimizer("gpt"),
    ):
        with pytest.raises(SystemExit) as end:
            call()
        assert end.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (rank == "0")
        assert all(line.startswith(f"megatron-snip: error: {named}") for line in lines)
    assert [name for name, *_ in fake.calls] == ["validate"]  # Megatron validates first
    assert attached == []


STATE = ControllerState(7, plan_of([]), refreshed=6).to_dict()


@pytest.mark.parametrize(
    ("loaded", "iteration", "refreshed", "warning"),
    [
        (STATE, 7, 6, ""),
        (None, 0, None, ""),
        (None, 7, None, "iteration 7 has no SNIP state"),
        # Megatron can rewind its data loader (--override-ckpt-iteration).
        (STATE, 3, None, "a refresh in flight is dropped"),
    ],
)
def test_a_checkpoints_state_is_resumed(
    loaded: Any, iteration: int, refreshed: int | None, warning: str, caplog: Any
) -> None:
    state = resumed_state(loaded, iteration, Topology())
    assert (state is None) == (loaded is None)
    if state is not None:
        assert (state.iteration, state.refreshed) == (iteration, refreshed)
        assert state.plan == plan_of([])
    assert warning in caplog.text and bool(warning) == bool(caplog.text)


def test_an_output_directory_that_cannot_be_used_is_named_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="not the marker") as caught:
        make_writers(SnipConfig(output_dir=tmp_path), Namespace(), Topology())
    assert caught.value.field == "output_dir"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
