"""Expert-parallel overlap in an FP8 or FP4 run: which inputs Megatron frees after the forward.

Under `--overlap-moe-expert-parallel-comm` Megatron runs a layer in parts. In an FP8 or FP4 run it
frees the experts' input after their forward, since the backward needs the quantized copy alone. A
plan may run experts in BF16, and their backward needs the input itself. So while any expert runs
something other than the job's own precision, that part follows Megatron's rule of BF16 runs.
"""

from dataclasses import replace
from typing import Any

from megatron_snip.patches.registry import Call, Session, patch

EXPERTS_PART = "mlp"


class _HighPrecision:
    """A TransformerConfig that reads as that of a BF16 run."""

    fp8 = fp4 = None

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


@patch(
    "megatron.core.models.common.utils",
    "should_free_input",
    needs=("name", "config"),
    optional=True,
)
def freed_inputs(call: Call, session: Session) -> Any:
    """Return whether the input of a layer's part is freed."""
    controller = session.controller
    given = call.arguments
    is_changed = controller is not None and not controller.model.experts_run_as_the_job
    if is_changed and given["name"] == EXPERTS_PART:
        given["config"] = _HighPrecision(given["config"])
    return call.run()


freed_inputs_before_0_19 = replace(
    freed_inputs, module="megatron.core.models.gpt.fine_grained_callables"
)
