"""A good document of every kind of file that is read, and how a test reads its hostile copies."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

from megatron_snip.errors import InfeasiblePlanError, PlanningError, UsageError
from megatron_snip.planning.stage_layers import StageLayers
from tests.unit.planning.build import plan_of, problem_of

STAGE_LAYERS = StageLayers([[{"decoder.layers.0": 0, "decoder.layers.1": 1}]])
PLAN = plan_of(
    ["fp4", "fp8"], iteration=3, stages=(0.5,), objective=0.25, stage_layers=STAGE_LAYERS
)
PROBLEM = problem_of([(0.1, 0.4), (0.2, 0.3)], scores=[{"abs_error": 0.1}] * 2).model_copy(
    update={"stage_layers": STAGE_LAYERS}
)
DIVERGENCES = {
    "version": 3,
    "iteration": 4,
    "linears": [{"name": "a", "stage": 0, "flops": 2.0, "options": {"fp4": {"quality_loss": 0.5}}}],
}
PRECISION = {
    "version": 3,
    "iteration": 5,
    "plan_iteration": 3,
    "plan_digest": PLAN.digest,
    "linears": [
        {
            "name": "a",
            "option": "fp4",
            "recipe": "nvfp4",
            "backend": "te",
            "weight_storage": "bfloat16",
            "fixed": "--snip-pins",
        }
    ],
    "unused_rules": ["--te-precision-config-file: mtp.* (bf16)"],
}
METRICS = {
    "iteration": 1,
    "loss": 2.5,
    "plan_iteration": 0,
    "changed_linears": 2,
    "wait_s": 0.1,
    "notices": [{"kind": "refresh_failed", "message": "why"}],
}
SECONDS = {"fprop": 1e-3, "dgrad": 2e-3, "wgrad": 3e-3}
CALIBRATION = {
    "version": 1,
    "machine": "x86_64",
    "device": "cpu",
    "date": "2026-01-01T00:00:00+00:00",
    "versions": {"torch": "2.13.0"},
    "tokens": 128,
    "linears": [
        {
            "names": "*",
            "out_features": 128,
            "in_features": 256,
            "seconds": dict.fromkeys(("bf16", "fp8", "fp4"), SECONDS),
        }
    ],
}
TE_CONFIG = {
    "configs": {
        "low": {
            "transformer_engine_config_type": "TEQuantizationParams",
            "training_recipe": {
                "fp4_quantization_recipe": "nvfp4",
                "override_quantized_autocast": True,
                "override_nonquantized_autocast": True,
            },
        }
    },
    "pipeline_stage": 0,
    "stage_layers": [[{"decoder.layers.0": 0}]],
    "matchers": {"a": {"type": "glob", "pattern": "*fc1", "config": "low", "enabled": True}},
}
SNIP = {"efficiency_target": 0.75, "formats": ["fp8", "fp4"], "pins": ["a*=fp8"], "interval": 10}

fuzzed = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)


def survives(read: Callable[[], Any], name: str = "") -> Any:
    """Read; return the result, or None after an error of one short line that has `name`."""
    try:
        return read()
    except (UsageError, InfeasiblePlanError, PlanningError) as error:
        text = str(error)
        assert text and "\n" not in text and name in text
        assert len(text) < 2000
        return None
