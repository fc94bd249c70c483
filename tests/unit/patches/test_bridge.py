"""Megatron-Bridge's loop, a fake one: settings, callbacks, and a user's first mistakes."""

import inspect
import json
import logging
import sys
from argparse import Namespace
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from megatron_snip.bridge import SnipCallback, SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.log import warn_once
from megatron_snip.patches.install import MEGATRON_BRIDGE, REGISTRY, install_for
from megatron_snip.patches.megatron_bridge import loop
from megatron_snip.patches.megatron_bridge.settings import (
    in_bridges_names,
    log_in_bridges_names,
    set_for_cpu,
    settings_of,
)
from tests.processes import ROOT

CFG = SimpleNamespace(
    train=SimpleNamespace(train_iters=9, micro_batch_size=2),
    checkpoint=SimpleNamespace(save="out", finetune=False),
    dataset=SimpleNamespace(dataloader_type="single", seq_length=8, _cache=1),
    dist=SimpleNamespace(distributed_backend="nccl"),
    optimizer=SimpleNamespace(lr=0.1, fp16=True),
    model=SimpleNamespace(
        fp16=False, fp8="hybrid", fp8_recipe="tensorwise", num_moe_experts=4, seq_length=16
    ),
    rng=SimpleNamespace(seed=3),
    peft=None,
)


def warning_filter(record: logging.LogRecord) -> bool:
    """Megatron's, under this name."""
    return record.levelno != logging.WARNING


class FakeBridge:
    """The modules that are patched; `calls` are those of `setup`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        fake = self

        def runtime_config_update(cfg):
            cfg.train.train_iters += 1

        def normalize_callbacks(callbacks):
            return callbacks

        def setup(state, train_valid_test_datasets_provider, callback_manager=None):
            fake.calls.append(state)
            return (state, ["model"], "optimizer", "scheduler")

        def setup_logging(logging_level=None, filter_warning=True):
            for name in list(logging.root.manager.loggerDict):
                logging.getLogger(name).addFilter(warning_filter)

        def train_step(forward_step_func, global_state, forward_backward_func):
            return {}, 0, False, False, 0, None, None, None

        def checkpoint_and_decide_exit(state, model, optimizer):
            return False

        def evaluate(state, forward_step_func):
            return {}, None, False

        def get_forward_backward_func(pp_size=None, vp_size=None):
            return None

        def generate_state_dict(ckpt_cfg, model, iteration=None):
            return {}

        def _load_base_checkpoint(load_dir, ckpt_cfg, rank0=False):
            return {}, "", False, None

        def _finish_train(global_state):
            return None

        functions = {
            loop.PRETRAIN: (runtime_config_update, normalize_callbacks, setup, _finish_train),
            loop.SETUP: (setup_logging,),
            loop.TRAIN: (train_step, checkpoint_and_decide_exit),
            loop.EVAL: (evaluate, get_forward_backward_func),
            loop.CHECKPOINTING: (generate_state_dict, _load_base_checkpoint),
            "megatron.bridge.package_info": (),
        }
        for name, members in functions.items():
            module: Any = ModuleType(name)
            vars(module).update({f.__name__: f for f in members}, __version__="0.6.2")
            monkeypatch.setitem(sys.modules, name, module)
        self.module: Any = sys.modules[loop.PRETRAIN]

    def pretrain(self, cfg: Any, callbacks: Any = None) -> None:
        """What Bridge's `pretrain` does of it, in its order."""
        self.module.runtime_config_update(cfg)
        callbacks = self.module.normalize_callbacks(callbacks)
        state = SimpleNamespace(cfg=cfg, train_state=SimpleNamespace(step=0))
        try:
            self.module.setup(state, "provider", callback_manager=callbacks)
        except BaseException:
            logging.getLogger(loop.PRETRAIN).exception("Pretrain failed")
            raise


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBridge]:
    fake = FakeBridge(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    yield fake
    REGISTRY.uninstall()


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of `attach`, which is not called."""
    calls: list[Any] = []
    monkeypatch.setattr(loop, "attach", lambda *args: calls.append(args))
    return calls


def cfg_of(**model: Any) -> Any:
    changed = SimpleNamespace(**{**vars(CFG.model), "fp8": None, **model})
    train = SimpleNamespace(**vars(CFG.train))
    return SimpleNamespace(**{**vars(CFG), "model": changed, "train": train})


def ends_in_one_line(capsys: pytest.CaptureFixture[str], action: Any) -> str:
    with pytest.raises(SystemExit) as end:
        action()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_release_has_the_parameters_of_patches_and_of_the_imitation(bridge: FakeBridge) -> None:
    """`tests/bridge/test_releases.py` compares the record with the release."""
    record = json.loads((ROOT / "tests" / "bridge" / "functions.json").read_text())
    patches = [p for p in MEGATRON_BRIDGE.patches if p.target in record]
    assert {p.target for p in patches} == record.keys()
    for patch in patches:
        assert set(patch.needs) <= set(record[patch.target]), patch.target
        imitated = inspect.signature(getattr(sys.modules[patch.module], patch.attribute))
        assert set(imitated.parameters) <= set(record[patch.target]), patch.target


def test_a_recipes_settings_have_the_names_of_megatron_lm() -> None:
    args = settings_of(CFG, iteration=5)
    assert (args.train_iters, args.save, args.lr, args.seed, args.iteration) == (
        9,
        "out",
        0.1,
        3,
        5,
    )
    assert (args.fp8, args.fp8_recipe, args.num_experts) == ("hybrid", "tensorwise", 4)
    assert args.fp16 is False and args.seq_length == 16  # the model's own win
    assert not hasattr(args, "_cache")
    in_core = SimpleNamespace(transformer=SimpleNamespace(num_layers=7), vocab_size=3)
    args = settings_of(SimpleNamespace(**{**vars(CFG), "model": in_core}))
    assert args.num_layers == 7 and args.vocab_size == 3


class Pretraining(GPTDatasetConfig):
    """Bridge's checks its fields later, too."""

    def __init__(self) -> None:
        self.dataloader_type = "single"


@pytest.mark.parametrize(
    ("dataset", "vary"),
    [
        (Pretraining(), False),
        (SimpleNamespace(dataloader_type="external"), True),
        (SimpleNamespace(dataloader_type="batch", dataset_kwargs=None), True),
        (SimpleNamespace(dataloader_type="cyclic", dataset_kwargs={}), True),
        (SimpleNamespace(dataset_kwargs={"pad_to_max_length": True}), False),
        (SimpleNamespace(dataloader_type="cyclic", pad_to_max_length=False), True),
        (SimpleNamespace(dataloader_type="cyclic", pad_to_max_length=True), False),
        (SimpleNamespace(pad_to_max_length=True, enable_in_batch_packing=True), True),
    ],
)
def test_samples_of_fine_tuning_vary_in_length_unless_they_are_padded(
    dataset: Any, vary: bool
) -> None:
    cfg = SimpleNamespace(**{**vars(CFG), "dataset": dataset})
    assert settings_of(cfg).variable_seq_lengths is vary


def test_a_cpu_run_sets_what_a_release_has() -> None:
    cfg = SimpleNamespace(dist=Namespace(distributed_backend="nccl"), model=Namespace(bf16=True))
    cfg.model.masked_softmax_fusion = True
    cfg.checkpoint = Namespace(async_save=True)
    set_for_cpu(cfg)
    assert cfg.checkpoint.async_save is False
    assert cfg.dist.distributed_backend == "gloo"
    assert vars(cfg.model) == {"bf16": True, "masked_softmax_fusion": False}


def test_flags_attach_a_controller_to_what_bridge_built(
    bridge: FakeBridge, attached: list[Any]
) -> None:
    assert install_for(["--recipe", "x", "--snip", "--snip-interval", "9"]) == ["--recipe", "x"]
    bridge.pretrain(cfg_of())
    ((_, config, args, model, optimizer, _, packages),) = attached
    assert config.enabled and config.interval == 9
    assert args.train_iters == 10  # in their final form
    assert (model, optimizer) == (["model"], "optimizer")
    assert [package.name for package in packages] == ["megatron-bridge", "megatron-core"]


def test_snips_warnings_stay_in_the_log(bridge: FakeBridge) -> None:
    """Bridge drops the warnings of all loggers unless a recipe sets `logger.filter_warnings`."""
    ours = logging.getLogger("megatron_snip.reporting.events")
    other = logging.getLogger("other")
    install_for(["--snip"])
    sys.modules[loop.SETUP].setup_logging()
    try:
        assert warning_filter not in ours.filters and warning_filter in other.filters
    finally:
        for name in list(logging.root.manager.loggerDict):
            logging.getLogger(name).removeFilter(warning_filter)


def test_without_snip_nothing_is_attached(bridge: FakeBridge, attached: list[Any]) -> None:
    install_for(["--recipe", "x"])
    bridge.pretrain(cfg_of())
    assert attached == [] and len(bridge.calls) == 1
    assert REGISTRY.session.found_megatron
    assert REGISTRY.installed == {p.target for p in MEGATRON_BRIDGE.patches[:2]}


@pytest.mark.parametrize("as_manager", [False, True])
def test_a_callback_turns_snip_on(
    bridge: FakeBridge, attached: list[Any], as_manager: bool
) -> None:
    callback = SnipCallback(SnipConfig(interval=9))
    manager = SimpleNamespace(list_callbacks=lambda event: [print, callback.on_train_start])
    bridge.pretrain(cfg_of(), manager if as_manager else [MagicMock(), callback])
    ((_, config, *_),) = attached
    assert config.enabled and config.interval == 9
    bridge.pretrain(cfg_of(), [])  # the next training of the process is without it
    assert len(attached) == 1
    bridge.pretrain(cfg_of(), [SnipCallback(SnipConfig(enabled=False))])
    assert len(attached) == 1


@pytest.mark.parametrize(("config", "got"), [((), "nothing"), (({"interval": 3},), "dict")])
def test_a_callback_wants_settings(
    bridge: FakeBridge, capsys: pytest.CaptureFixture[str], config: Any, got: str
) -> None:
    line = ends_in_one_line(capsys, lambda: SnipCallback(*config))
    assert f"SnipCallback needs settings, and got {got}; write SnipCallback(SnipConfig(" in line


def test_two_sources_of_settings_are_one_too_many(
    bridge: FakeBridge, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = SnipCallback(SnipConfig())
    install_for(["--snip"])
    line = ends_in_one_line(capsys, lambda: bridge.pretrain(cfg_of(), [callback]))
    assert "from --snip flags and from a SnipCallback" in line
    REGISTRY.session.given = {}
    two = [callback, SnipCallback(SnipConfig())]
    line = ends_in_one_line(capsys, lambda: bridge.pretrain(cfg_of(), two))
    assert "pretrain got 2 SnipCallbacks; give it one" in line
    assert bridge.calls == []


def test_a_callback_that_pretrain_does_not_get_is_missed(
    bridge: FakeBridge, attached: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    callback = SnipCallback(SnipConfig())
    bridge.pretrain(cfg_of(), [callback])
    assert attached and not caplog.records
    bridge.pretrain(cfg_of())
    assert "pretrain did not get the SnipCallback; write pretrain(" in caplog.text
    assert len(attached) == 1


def test_a_callback_of_another_loop_says_so(
    bridge: FakeBridge, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = SnipCallback(SnipConfig())
    line = ends_in_one_line(capsys, lambda: callback.on_train_start("context"))
    assert "give the callback to that function" in line


@pytest.mark.parametrize(
    ("model", "text"),
    [({"fp16": True}, "model.fp16"), ({"modelopt_enabled": True}, "ModelOpt")],
)
def test_a_setting_that_cannot_run_ends_before_the_model_is_built(
    bridge: FakeBridge, capsys: pytest.CaptureFixture[str], model: Any, text: str
) -> None:
    install_for(["--snip"])
    assert text in ends_in_one_line(capsys, lambda: bridge.pretrain(cfg_of(**model)))
    assert bridge.calls == []


def test_a_refusal_of_the_model_leaves_no_traceback(
    bridge: FakeBridge,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`pretrain` logs what ends it; other errors stay in its log."""
    install_for(["--snip"])
    error: Exception = UsageError("the pin fits no linear")

    def refuse(*args: Any) -> None:
        raise error

    monkeypatch.setattr(loop, "attach", refuse)
    assert "the pin fits no linear" in ends_in_one_line(capsys, lambda: bridge.pretrain(cfg_of()))
    assert not caplog.records
    error = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        bridge.pretrain(cfg_of())
    assert "Pretrain failed" in caplog.text and "a bug" in caplog.text


def test_flops_of_a_repeated_iteration_count_once(
    bridge: FakeBridge, attached: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_twice(call: Any, session: Any, iteration: int) -> None:
        for _ in range(2):
            call.arguments["forward_backward_func"]()

    def forward_backward() -> None:
        state._flops_seqlen_sum += 8

    monkeypatch.setattr(loop, "run_step", run_twice)
    install_for(["--snip"])
    bridge.pretrain(cfg_of())
    state = SimpleNamespace(_flops_seqlen_sum=0, train_state=SimpleNamespace(step=0))
    sys.modules[loop.TRAIN].train_step(None, state, forward_backward)
    assert state._flops_seqlen_sum == 8


@pytest.mark.parametrize(
    ("name", "section"),
    [("peft", object()), ("tensor_inspect", SimpleNamespace(enabled=True))],
)
def test_adapters_and_tensor_inspection_are_refused(
    bridge: FakeBridge, capsys: pytest.CaptureFixture[str], name: str, section: Any
) -> None:
    install_for(["--snip"])
    cfg = SimpleNamespace(**{**vars(cfg_of()), name: section})
    assert name in ends_in_one_line(capsys, lambda: bridge.pretrain(cfg))


def test_a_release_without_a_function_is_one_line(
    bridge: FakeBridge, capsys: pytest.CaptureFixture[str]
) -> None:
    del bridge.module.normalize_callbacks
    line = ends_in_one_line(capsys, lambda: SnipCallback(SnipConfig()))
    assert "megatron-bridge 0.6.2 has no megatron.bridge.training.pretrain.normalize_ca" in line
    assert ">=0.6,<0.7" in line


def test_messages_have_bridges_names_of_settings(caplog: pytest.LogCaptureFixture) -> None:
    precision = SimpleNamespace(bf16=True, fp16=False, fp8_param_gather=True)
    settings_of(SimpleNamespace(**{**vars(CFG), "mixed_precision": precision}))
    for text, wanted in (
        ("--fp8-param-gather or --fp4-param-gather alone", "mixed_precision.fp8_param_gather or "),
        ("--snip cannot run with --fp16: use --bf16", "mixed_precision.fp16: use mixed_precision."),
        ("change --micro-batch-size or --seq-length", "train.micro_batch_size or model.seq_length"),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "mixed_precision.fp8 hybrid model.fp8_rec"),
        ("4 by --te-precision-config-file (such as x)", "4 by model.quant_recipe (such as x)"),
        ("--snip-formats bf16,fp8 and --cpu", "--snip-formats bf16,fp8 and --cpu"),
    ):
        assert wanted in in_bridges_names(text), in_bridges_names(text)
    former = logging.getLogRecordFactory()
    try:
        log_in_bridges_names()
        log_in_bridges_names()
        logging.getLogger("megatron_snip.run").warning("change %s", "--seq-length")
        logging.getLogger("other").warning("change %s", "--seq-length")
    finally:
        logging.setLogRecordFactory(former)
    assert caplog.messages == ["change model.seq_length", "change --seq-length"]
