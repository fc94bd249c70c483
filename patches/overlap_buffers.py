"""Buffers for `--tp-comm-overlap` in both precisions that a plan may give a linear."""

from collections.abc import Mapping
from typing import Any

from megatron_snip.patches.registry import Call, Session, patch

Settings = Mapping[str, Mapping[str, Any]]
"""Settings of the buffers by layer, as `--tp-comm-overlap-cfg` gives them."""

_REDUCE_SCATTER_DGRADS = ("qkv_dgrad", "fc1_dgrad")
"""Their `method`, if it is given, moves them from one of Transformer Engine's lists to another. The
lists serve all precisions, and a second move is an error."""


@patch(
    "transformer_engine.pytorch.module.base",
    "initialize_ub",
    needs=("quantization_modes", "ub_cfgs"),
    optional=True,
)
def both_buffers(call: Call, session: Session) -> Any:
    """Make FP8 buffers and those in high precision; Megatron asks for the run's alone.

    Transformer Engine has atomic GEMMs in FP8 alone, and makes no other buffers beside theirs. In
    such a job linears overlap in the job's precision only.
    """
    modes = call.arguments.get("quantization_modes")
    given = call.arguments.get("ub_cfgs")
    settings = given if isinstance(given, list) else [given for _ in modes or ()]
    # Of the run's own precision, which comes last.
    of_run = settings[-1] if settings else None
    has_atomic_gemms = any(layer.get("atomic_gemm") for layer in (of_run or {}).values())
    if modes and session.makes_plans and not has_atomic_gemms:
        others = [mode for mode in type(modes[0]) if mode not in modes]
        added = [_for_another_precision(of_run) for _ in others]
        call.arguments["ub_cfgs"] = [*settings, *added]
        call.arguments["quantization_modes"] = [*modes, *others]
    return call.run()


def _for_another_precision(settings: Settings | None) -> dict[str, dict[str, Any]] | None:
    """Return the job's settings by layer without what holds for its own precision alone."""
    if settings is None:
        return None
    found = {}
    for layer, given in settings.items():
        # In a BF16 job `fp8_buf` has no effect. In FP8 buffers it would round a linear's output,
        # which nothing measures; Transformer Engine's default does not.
        dropped = {"fp8_buf"}
        if layer in _REDUCE_SCATTER_DGRADS:
            dropped.add("method")
        found[layer] = {name: value for name, value in given.items() if name not in dropped}
    return found
