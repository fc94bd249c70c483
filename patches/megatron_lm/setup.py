"""From Megatron's settings and model to a controller.

Settings are checked right after Megatron's own, on every rank, before any process group exists. A
controller is attached when Megatron has built the model and loaded a checkpoint.
"""

from dataclasses import replace
from typing import Any

from megatron_snip.errors import UsageError
from megatron_snip.patches import cpu
from megatron_snip.patches.arguments import exit_on_error, snip_config
from megatron_snip.patches.attach import attach
from megatron_snip.patches.registry import CORE, Call, Session, patch


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


@patch("megatron.training.training", "setup_model_and_optimizer", needs=("model_type",), returns=2)
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
