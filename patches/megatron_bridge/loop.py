"""Megatron-Bridge's training loop: settings, model, iterations, evaluations and checkpoints.

`pretrain` first puts a recipe's settings into their final form, then looks at its callbacks. SNIP's
settings are checked there, on every rank, before any process group exists.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.log import warn_once_per_job
from megatron_snip.patches import cpu, overlap_buffers
from megatron_snip.patches.arguments import Refusal, exit_on_error, snip_config
from megatron_snip.patches.attach import attach
from megatron_snip.patches.checkpoint import load_state, save_state
from megatron_snip.patches.megatron_bridge.callback import callbacks_in
from megatron_snip.patches.megatron_bridge.settings import (
    in_bridges_names,
    log_in_bridges_names,
    set_for_cpu,
    settings_of,
)
from megatron_snip.patches.registry import BRIDGE, CORE, Call, Session, patch
from megatron_snip.patches.step import end_step, function_of_evaluation, run_evaluation, run_step

logger = logging.getLogger(__name__)

PRETRAIN = "megatron.bridge.training.pretrain"
SETUP = "megatron.bridge.training.setup"
TRAIN = "megatron.bridge.training.train"
EVAL = "megatron.bridge.training.eval"
CHECKPOINTING = "megatron.bridge.training.checkpointing"


@patch(PRETRAIN, "runtime_config_update", needs=("cfg",), when="always")
def final_settings(call: Call, session: Session) -> Any:
    """Note the settings in their final form; under `--cpu` set those of a run without GPUs."""
    cfg = call.arguments["cfg"]
    if cpu.is_installed():
        set_for_cpu(cfg)
    result = call.run()
    session.found_megatron = True
    session.args = settings_of(cfg)
    return result


@patch(PRETRAIN, "normalize_callbacks", needs=("callbacks",), when="always")
def callbacks(call: Call, session: Session) -> Any:
    """Take SNIP's settings from a SnipCallback, and check them beside the job's."""
    exit_on_error(lambda: _check(call.arguments.get("callbacks"), session), in_bridges_names)
    return call.run()


@patch(PRETRAIN, "setup", needs=("state",), returns=3)
def model_setup(call: Call, session: Session) -> Any:
    """Attach a controller to what Bridge has built and loaded."""
    # `pretrain` logs what ends it with a traceback, on every rank.
    logging.getLogger(PRETRAIN).addFilter(_is_no_refusal)
    session.end()  # the training run before this one in the process (in-process restart)
    result = call.run()
    state, model, optimizer = result[:3]
    args = settings_of(state.cfg, int(state.train_state.step))
    config = session.settings
    assert config is not None, "checked with the callbacks"
    if config.enabled:
        loggers = partial(_loggers, state)
        packages = [BRIDGE, CORE]
        exit_on_error(
            lambda: attach(session, config, args, model, optimizer, loggers, packages),
            in_bridges_names,
        )
    return result


@patch(SETUP, "setup_logging", needs=("filter_warning",), optional=True)
def logging_setup(call: Call, session: Session) -> Any:
    """Keep SNIP's warnings in the log; `logger.filter_warnings`, Bridge's default, drops all."""
    result = call.run()
    own = [name for name in logging.root.manager.loggerDict if name.startswith("megatron_snip")]
    for logger in map(logging.getLogger, own):
        for each in list(logger.filters):
            if getattr(each, "__name__", "") == "warning_filter":  # Bridge's
                logger.removeFilter(each)
    return result


@patch(TRAIN, "train_step", needs=("forward_backward_func", "global_state"), returns=6)
def train_step(call: Call, session: Session) -> Any:
    """Run the forward-backward function through the controller."""
    state = call.arguments["global_state"]
    function = call.arguments["forward_backward_func"]
    call.arguments["forward_backward_func"] = _counting_flops_once(function, state)
    return run_step(call, session, int(state.train_state.step) + 1)


@patch(TRAIN, "checkpoint_and_decide_exit", needs=("state", "optimizer"))
def step_end(call: Call, session: Session) -> Any:
    """All ranks: report an iteration, after Bridge's log and evaluation."""
    state, optimizer = call.arguments["state"], call.arguments["optimizer"]
    if session.controller is not None:
        end_step(
            session,
            int(state.train_state.step),
            optimizer,
            seq_length=int(state.cfg.model.seq_length),
            log_interval=int(state.cfg.logger.log_interval),
        )
    return call.run()


@patch(EVAL, "evaluate", needs=("state",), returns=1)
def evaluation(call: Call, session: Session) -> Any:
    """Evaluate in the plan's precision, in BF16, or in both."""
    return run_evaluation(call, session, bool(call.arguments.get("is_test", False)))


@patch(EVAL, "get_forward_backward_func")
def forward_backward_func(call: Call, session: Session) -> Any:
    """Return Megatron's forward-backward function, or what runs it in two precisions."""
    return function_of_evaluation(call, session)


@patch(CHECKPOINTING, "generate_state_dict", needs=("ckpt_cfg", "iteration"))
def save(call: Call, session: Session) -> Any:
    """Add SNIP's state to the state dict."""
    return save_state(call, session, call.arguments["ckpt_cfg"].ckpt_format)


@patch(CHECKPOINTING, "_load_base_checkpoint", needs=("ckpt_cfg", "rank0"), returns=3)
def load(call: Call, session: Session) -> Any:
    """Take SNIP's state from the checkpoint that Bridge reads."""
    settings = call.arguments["ckpt_cfg"]
    return load_state(call, session, settings.finetune, settings.ckpt_format)


@patch(PRETRAIN, "_finish_train")
def end(call: Call, session: Session) -> Any:
    """Close the controller before Bridge closes its loggers and process groups."""
    session.end()
    return call.run()


# Bridge takes it out of the package; Megatron-LM out of the module that defines it.
both_buffers = replace(overlap_buffers.both_buffers, module="transformer_engine.pytorch")

PATCHES = (
    *(final_settings, callbacks, model_setup, logging_setup),
    *(train_step, step_end, evaluation, forward_backward_func),
    *(save, load, end, both_buffers),
)


def _check(callbacks: Any, session: Session) -> None:
    """Find the settings of this training run and check them.

    Raises:
        SnipError: if there is more than one source of settings, or they do not fit the job.
    """
    found = callbacks_in(callbacks)
    session.config = found[0].config if found else None
    if session.has_callback and not (found or session.given):
        warn_once_per_job(
            logger,
            "SNIP does nothing in this training run: pretrain did not get the SnipCallback; "
            "write pretrain(cfg, forward_step, callbacks=[snip])",
        )
    if len(found) > 1:
        raise UsageError(f"pretrain got {len(found)} SnipCallbacks; give it one")
    if found and session.given:
        raise UsageError(
            "settings come from --snip flags and from a SnipCallback; drop the flags, or run the "
            "script without the callback"
        )
    assert session.args is not None
    log_in_bridges_names()
    given = session.given if session.config is None else session.config
    config = snip_config(session.args, given)
    session.settings = config
    session.makes_plans = config.enabled and not config.collect_only


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """A filter of log records: whether a record does not report a refusal, whose line is out."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, Refusal)


def _counting_flops_once(function: Callable[..., Any], state: Any) -> Callable[..., Any]:
    """Return a forward-backward function that may be called several times in an iteration.

    Bridge's forward step adds what it counts FLOPs by to attributes of its state. Only the last
    call of an iteration counts: the controller may measure before it trains, or run an iteration
    again.

    Args:
        function: Megatron's forward-backward function.
        state: Bridge's GlobalState.
    """
    before = {name: value for name, value in vars(state).items() if name.startswith("_flops_")}

    def run(**kwargs: Any) -> Any:
        for name, value in before.items():
            setattr(state, name, value)
        return function(**kwargs)

    return run


def _loggers(state: Any) -> dict[str, Any]:
    return {
        "TensorBoard": state.tensorboard_logger,
        "W&B": state.wandb_logger,
        # Older releases have no such loggers.
        "MLflow": getattr(state, "mlflow_logger", None),
        "Comet": getattr(state, "comet_logger", None),
    }
