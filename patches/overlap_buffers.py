"""Buffers for `--tp-comm-overlap` in both precisions that a plan may give a linear."""

from typing import Any

from megatron_snip.patches.registry import Call, Session, patch


@patch(
    "transformer_engine.pytorch.module.base",
    "initialize_ub",
    needs=("quantization_modes", "ub_cfgs"),
    optional=True,
)
def both_buffers(call: Call, session: Session) -> Any:
    """Make FP8 buffers and those in high precision; Megatron asks for the run's alone."""
    modes = call.arguments.get("quantization_modes")
    if modes and session.makes_plans:
        others = [mode for mode in type(modes[0]) if mode not in modes]
        settings = call.arguments.get("ub_cfgs")
        if isinstance(settings, list):  # one for each mode; else one serves all
            call.arguments["ub_cfgs"] = settings + [settings[-1] for _ in others]
        call.arguments["quantization_modes"] = [*modes, *others]
    return call.run()
