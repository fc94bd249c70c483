"""Megatron-LM's training loop: flags, settings, model, iterations, evaluations, checkpoints.

Settings are checked right after Megatron's own, on every rank, before any process group exists. A
controller is attached when Megatron has built the model and loaded a checkpoint.
"""

import argparse
from dataclasses import replace
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.patches import cpu
from megatron_snip.patches.arguments import add_snip_arguments, exit_on_error, snip_config
from megatron_snip.patches.attach import attach
from megatron_snip.patches.checkpoint import load_state, save_state
from megatron_snip.patches.cpu.megatron import fused_kernels, set_cpu_defaults
from megatron_snip.patches.registry import CORE, Call, Session, patch
from megatron_snip.patches.step import end_step, function_of_evaluation, run_evaluation, run_step

TRAINING = "megatron.training.training"
CHECKPOINTING = "megatron.training.checkpointing"


@patch("megatron.training.arguments", "add_megatron_arguments", needs=("parser",), when="always")
def arguments(call: Call, session: Session) -> Any:
    """Add SNIP's flags; under `--cpu` also set the defaults of a run without GPUs."""
    parser = call.run()
    session.found_megatron = True
    add_snip_arguments(parser)
    _escape_percent_signs(parser)
    if cpu.is_installed():
        set_cpu_defaults(parser)
    return parser


def _escape_percent_signs(parser: argparse.ArgumentParser) -> None:
    """Make `--help` work in spite of a stray percent sign in one of Megatron's texts (0.19)."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")


@patch("megatron.training.arguments", "validate_args", needs=("args",), when="always")
def validation(call: Call, session: Session) -> Any:
    """Check SNIP's settings after Megatron has validated its own."""
    args = call.arguments["args"]
    if cpu.is_installed():
        args.async_save = False  # the process that would write a checkpoint selects a GPU
    result = call.run()
    config = exit_on_error(lambda: snip_config(args, session.given))
    session.settings = config
    if config.enabled and not session.with_snip:
        exit_on_error(_refuse_late_flag)
    session.makes_plans = config.enabled and not config.collect_only
    return result


def _refuse_late_flag() -> None:
    raise UsageError(
        "the script gave this flag itself, after its command line had been read; give it where the "
        "script is started: python -m megatron_snip SCRIPT ARGS --snip",
        field="enabled",
    )


validation_before_0_18 = replace(validation, module="megatron.training.initialize", optional=True)


@patch(TRAINING, "setup_model_and_optimizer", needs=("model_type",), returns=2)
def model_setup(call: Call, session: Session) -> Any:
    """Attach a controller to what Megatron has built and loaded."""
    from megatron.training.global_vars import get_args

    session.end()  # the training run before this one in the process (in-process restart)
    args = get_args()
    config = session.settings
    if config is None:  # Megatron does not validate a --yaml-cfg namespace
        config = exit_on_error(lambda: snip_config(args, session.given))
    result = call.run()
    if config.enabled:
        model, optimizer = result[0], result[1]
        exit_on_error(lambda: attach(session, config, args, model, optimizer, loggers, [CORE]))
    return result


def loggers() -> dict[str, Any]:
    """Return the last rank's loggers by name; each may be None."""
    from megatron.training import global_vars

    return {
        "TensorBoard": global_vars.get_tensorboard_writer(),
        "W&B": global_vars.get_wandb_writer(),
    }


@patch(TRAINING, "train_step", needs=("forward_backward_func", "iteration"), returns=6)
def train_step(call: Call, session: Session) -> Any:
    """Run the forward-backward function through the controller."""
    if session.controller is None:
        return call.run()
    return run_step(call, session, _iterations_done(call.arguments.get("iteration")) + 1)


@patch(TRAINING, "post_training_step_callbacks", needs=("optimizer", "iteration"))
def report_step(call: Call, session: Session) -> Any:
    """All ranks: report an iteration, after Megatron's log and evaluation."""
    result = call.run()  # a count of FLOPs that the training loop goes on with
    if session.controller is None:
        return result
    from megatron.training.global_vars import get_args

    args = get_args()
    end_step(
        session,
        call.arguments["iteration"],  # Megatron has counted it by now: it is 1-based here
        call.arguments["optimizer"],
        seq_length=int(args.seq_length),
        log_interval=int(args.log_interval),
    )
    return result


@patch(TRAINING, "evaluate", needs=("forward_step_func",), returns=1)
def evaluate(call: Call, session: Session) -> Any:
    """Evaluate in the plan's precision, in BF16, or in both."""
    return run_evaluation(call, session, session.evaluates_test_set)


@patch(TRAINING, "evaluate_and_print_results", needs=("prefix",), optional=True)
def note_test_set(call: Call, session: Session) -> Any:
    """Note whether this call evaluates the test set. Megatron passes that in a log prefix only."""
    session.evaluates_test_set = "on test set" in str(call.arguments["prefix"])
    try:
        return call.run()
    finally:
        session.evaluates_test_set = False


@patch(TRAINING, "get_forward_backward_func")
def forward_backward_func(call: Call, session: Session) -> Any:
    """Return Megatron's forward-backward function, or within an evaluation what runs it there."""
    return function_of_evaluation(call, session)


def _iterations_done(passed: Any) -> int:
    if passed is None:  # scripts that call `train_step` themselves may leave it out
        from megatron.training.global_vars import get_args

        passed = get_args().curr_iteration
    return int(passed)


@patch(CHECKPOINTING, "generate_state_dict", needs=("args", "iteration"))
def save(call: Call, session: Session) -> Any:
    """Add SNIP's state to the state dict."""
    return save_state(call, session, call.arguments["args"].ckpt_format)


@patch(CHECKPOINTING, "_load_base_checkpoint", needs=("args", "rank0"), returns=3)
def load(call: Call, session: Session) -> Any:
    """Take SNIP's state from the checkpoint that Megatron reads."""
    args = call.arguments["args"]
    return load_state(call, session, getattr(args, "finetune", False), args.ckpt_format)


PATCHES = (
    arguments,
    validation,
    validation_before_0_18,
    model_setup,
    train_step,
    report_step,
    evaluate,
    note_test_set,
    forward_backward_func,
    save,
    load,
    fused_kernels,
)
