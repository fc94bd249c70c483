"""What SNIP costs a job, computed from its layout and from what the benchmarks measured.

The measured numbers are those of docs/gpu.md and docs/at-scale.md; a test compares them with
benchmarks/results/. Nothing here was measured on the job's own machines.
"""

import math
from collections.abc import Sequence
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.formats import get_format
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.planned_linear import PlannedLinear
from megatron_snip.options import Option
from megatron_snip.patches.preflight.job import BuiltJob
from megatron_snip.patches.preflight.stages import Stage
from megatron_snip.statistics.sample import (
    LEAST_TOKENS,
    MOST_MICROBATCHES,
    MOST_TOKENS,
    TOKENS_PER_SAMPLE,
)

MEASURED_OVER_BASELINE = (1.83, 2.49)
"""Time of an iteration of one microbatch that is measured, in iterations that are not (H200), by
release 0.2.0, which multiplied to measure. This one does not; no GPU has timed it: a bound."""

HOP_S = 41.8e-6
BYTES_PER_S = 2.047e9
SCALE_RANKS = 32
SCALE_LINEARS = 504
"""Of Llama-405B, whose control plane benchmarks/results/scale.jsonl has on one machine."""
PHASES: dict[str, tuple[float, float, float]] = {
    "start": (6.0, 1329434, 0.0356),
    "refresh": (2.0, 47991200, 0.1429),
    "apply": (2.0, 225805, 0.0168),
}
"""Exchanges, bytes of the rank with the most, and its seconds of CPU at SCALE_RANKS, by phase. The
seconds are those that give what the benchmark computes for 16,384 ranks."""


def control_seconds(num_linears: int, ranks: int) -> dict[str, float]:
    """Return the seconds of each phase of the control plane at a number of ranks."""
    depth = math.ceil(math.log2(max(ranks, 2)))
    growth = depth / math.log2(SCALE_RANKS) * num_linears / SCALE_LINEARS
    return {
        phase: exchanges * 2 * depth * HOP_S + growth * (num_bytes / BYTES_PER_S + cpu_s)
        for phase, (exchanges, num_bytes, cpu_s) in PHASES.items()
    }


def measuring(job: BuiltJob, config: SnipConfig) -> dict[str, Any]:
    """Return what measured iterations cost.

    Returns:
        `microbatches` of a rank in an iteration and how many of these are `measured`; `ratio`,
        least and most, of a measured iteration to another one; `share` of the run at the interval
        of the settings.
    """
    data = job.stages[0].topology.data
    context = job.stages[0].topology.context
    num_microbatches = _num_microbatches(job)
    measured = min(num_microbatches, math.ceil(MOST_MICROBATCHES * context / data.size))
    part = measured / num_microbatches
    ratio = [round(1 + (each - 1) * part, 2) for each in MEASURED_OVER_BASELINE]
    return {
        "microbatches": num_microbatches,
        "measured": measured,
        "ratio": ratio,
        "share": [round((each - 1) / config.interval, 5) for each in ratio],
    }


def memory_gib(
    job: BuiltJob, models: Sequence[PlannedModel], formats: tuple[Option, Option], target: float
) -> dict[str, float]:
    """Return the memory that SNIP adds to the rank that gets the most, in GiB.

    It is computed without recomputation of activations, and with balanced experts.

    Args:
        job: the job.
        models: the planned linears of each stage.
        formats: the options of the highest and the lowest precision.
        target: share of the FLOPs in the lowest one.

    Returns:
        `measuring`: the samples of the inputs in flight. `lowest`: all linears in the lowest
        precision, in place of what the job runs; `highest` likewise; `at target`: between the two.
        A saving is negative.
    """
    highest, lowest = formats
    found = dict.fromkeys(("measuring", "lowest", "highest", "at target"), -math.inf)
    for stage, model in zip(job.stages, models, strict=True):
        high = sum(_added_bytes(each, highest, job, stage, model) for each in model.linears)
        low = sum(_added_bytes(each, lowest, job, stage, model) for each in model.linears)
        of_stage = {
            "measuring": sum(_sample_bytes(each, job, stage, model) for each in model.linears),
            "lowest": low,
            "highest": high,
            "at target": target * low + (1 - target) * high,
        }
        for name, value in of_stage.items():
            found[name] = max(found[name], value / 2**30)
    return {name: round(value, 2) for name, value in found.items()}


def _num_microbatches(job: BuiltJob) -> int:
    args = job.args
    data = job.stages[0].topology.data.size // job.stages[0].topology.context
    samples = int(getattr(args, "global_batch_size", None) or args.micro_batch_size * data)
    return max(samples // (int(args.micro_batch_size) * data), 1)


def _in_flight(job: BuiltJob, stage: Stage) -> int:
    """Return the microbatches whose activations a stage holds in a 1F1B schedule."""
    depth = stage.topology.num_stages - stage.topology.stage
    return min(_num_microbatches(job), depth)


def _tokens(linear: PlannedLinear, model: PlannedModel) -> float:
    """Return the tokens whose input a rank saves of a microbatch; 0 if they vary.

    Under sequence parallelism it has its part of a column-parallel linear's input, and all tokens
    of a row-parallel one's, whose features are split. The tokens of experts are split before.
    """
    config = model.config
    tokens = float(model.runtime.tokens.of_linear(linear.name) or 0)
    tokens /= int(getattr(config, "context_parallel_size", 1))
    of_experts = linear.placements[0].expert is not None
    is_split = of_experts or linear.placements[0].kind == "column"
    if is_split and getattr(config, "sequence_parallel", False):
        tokens /= int(config.tensor_model_parallel_size)
    if of_experts:
        local = model.job.num_experts[linear.name] / int(config.expert_model_parallel_size)
        tokens *= linear.placements[0].num_active * len(linear.placements) / local
    return tokens


def _added_bytes(
    linear: PlannedLinear, option: Option, job: BuiltJob, stage: Stage, model: PlannedModel
) -> float:
    """Return the bytes that a linear needs more under an option than in the job."""
    if option == linear.job_option or linear.refusal(option) is not None:
        return 0.0
    elements = sum(weight.numel() for weight in linear.weights)
    if model.job.backend == "simulate":
        return 2.0 * elements  # what the simulated GEMM multiplies (linears/runtime.py)
    weights = _quantized_bytes(option)
    if getattr(linear, "stored", None) is not None:
        weights += 2.0  # a copy in BF16; the stored weight stays
    else:
        weights -= _quantized_bytes(linear.job_option)
    # What is saved for wgrad, of each microbatch in flight.
    per_number = (_bytes(option.wgrad) - _bytes(linear.job_option.wgrad)) * _in_flight(job, stage)
    numbers = _tokens(linear, model) * linear.weights[0].shape[1]
    return elements * weights + per_number * numbers


def _quantized_bytes(option: Option) -> float:
    """Return the bytes for each weight that Transformer Engine keeps beside the BF16 one."""
    return sum(_bytes(name) for name in (option.fprop, option.dgrad) if name != "bf16")


def _bytes(format_name: str) -> float:
    return get_format(format_name).bits / 8


def _sample_bytes(linear: PlannedLinear, job: BuiltJob, stage: Stage, model: PlannedModel) -> float:
    """Return the bytes of a linear's samples in a measured iteration."""
    tokens = _tokens(linear, model)
    sampled = min(max(tokens / TOKENS_PER_SAMPLE, LEAST_TOKENS), MOST_TOKENS, tokens)
    numbers = sampled * linear.weights[0].shape[1]
    return 2.0 * numbers * _in_flight(job, stage)
