"""Ranks agree on their settings before anything else, or every rank ends with one line.

A stale file or another command line on one node would otherwise end in a hang, or in plans that the
ranks do not share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError, shortened
from megatron_snip.version import __version__

if TYPE_CHECKING:  # without --snip a run imports no torch of ours
    from megatron_snip.collectives import Gathered
    from megatron_snip.linears.te.machine import Machine

logger = logging.getLogger(__name__)

MOST_SHOWN = 3
"""Of settings that differ."""

OF_ONE_RANK = frozenset({"output_dir"})
"""SNIP's settings that rank 0 alone uses; nodes may name other paths."""

OF_MEGATRON = (
    # what each rank does, and when
    "seed",
    "train_iters",
    "iteration",
    "micro_batch_size",
    "global_batch_size",
    "eval_micro_batch_size",
    "eval_global_batch_size",
    "seq_length",
    "decoder_seq_length",
    "variable_seq_lengths",
    "calculate_per_token_loss",
    "eval_interval",
    "eval_iters",
    "full_validation",
    "log_interval",
    "tensorboard_log_interval",
    "save_interval",
    "distributed_timeout_minutes",
    # the layout
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    # what the linears run
    "bf16",
    "fp16",
    "fp8",
    "fp8_recipe",
    "fp8_param_gather",
    "fp4",
    "fp4_recipe",
    "fp4_param_gather",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "transformer_impl",
    "cuda_graph_impl",
    # the model and its optimizer
    "num_layers",
    "hidden_size",
    "num_experts",
    "moe_router_topk",
    "optimizer",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
)
"""Megatron's settings by which SNIP's decisions, or the order of its exchanges, differ."""

_STAGE = " of pipeline stage "


def settings_of_rank(config: SnipConfig, args: argparse.Namespace) -> dict[str, str]:
    """Return what must be the same on all ranks, as texts by the flag that a user would give.

    Args:
        config: SNIP's settings.
        args: Megatron's, by the names that Megatron-LM's parser gives them.
    """
    from megatron_snip.statistics.added import STATISTICS

    own = {
        f"--snip-{name.replace('_', '-')}": value
        for name, value in config.model_dump(mode="json").items()
        if name not in OF_ONE_RANK
    }
    megatron = {
        f"--{name.replace('_', '-')}": getattr(args, name)
        for name in OF_MEGATRON
        if hasattr(args, name)
    }
    added = {"statistics of plugins": sorted(STATISTICS)}
    found = {"megatron-snip": __version__, **own, **megatron, **added}
    return {name: _text(value) for name, value in found.items()}


def machine_of_rank(machine: Machine) -> dict[str, str]:
    """Return what must be the same of the ranks' machines, as `settings_of_rank` does.

    What a linear can run, and how its statistics are measured, depends on the GPU, on Transformer
    Engine and on variables of the environment.

    Args:
        machine: the rank's, with Transformer Engine where any rank may have its linears.
    """
    from megatron_snip.linears.te.machine import (
        OVERRIDE,
        RECIPES_PER_GEMM,
        RECIPES_PER_GEMM_IN_EXPERTS,
    )
    from megatron_snip.linears.te.recipe_table import RECIPES

    found = {
        "GPU": str(machine),
        "Transformer Engine": machine.te_version or "not there",
        OVERRIDE: machine.backward_override or "without effect",
    }
    for name in (*RECIPES, RECIPES_PER_GEMM, RECIPES_PER_GEMM_IN_EXPERTS):
        reason = machine.te_unavailable.get(name)
        found[f"Transformer Engine's recipe {name}"] = reason or "available"
    for recipe in RECIPES.values():
        for setting in recipe.variables:
            if setting.is_active(os.environ):
                found[setting.variable] = os.environ[setting.variable]
            else:  # another row may have other values of the same variable
                found.setdefault(setting.variable, "without effect")
    return found


def files_of_rank(config: Any, stage: int, state: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what must be the same of files that every rank has read, as `settings_of_rank` does.

    Args:
        config: the model's TransformerConfig. Its precision file is compared within a pipeline
            stage: `megatron-snip export` writes one for each.
        stage: the rank's pipeline stage.
        state: SNIP's state in the checkpoint, or None.
    """
    recipe = getattr(config, "quant_recipe", None)
    rules = None
    if recipe is not None:
        matchers = [(getattr(each, "pattern", ""), each.config_key) for each in recipe.matchers]
        rules = [matchers, recipe.configs]
    return {
        f"--te-precision-config-file{_STAGE}{stage}": _digest(rules),
        "SNIP's state in the checkpoint": _digest(state),
    }


def _digest(value: Any) -> str:
    if value is None:
        return "none"
    text = json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return f"one with SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def refuse_ranks_without_snip() -> None:
    """All ranks that have SNIP, before they exchange anything: refuse ranks that have it not.

    Raises:
        UsageError: on every rank that has SNIP; it names the others.
    """
    import torch.distributed as dist

    from megatron_snip.collectives import ranks_text, runs_of

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    number = store.add(f"snip/starts/{rank}", 1)  # a process may train more than once
    is_first = store.add(f"snip/with_snip/{number}", 1) == 1
    # What a rank without SNIP does next is a barrier of all ranks, too: Megatron-LM's before it
    # builds the data sets, Megatron-Bridge's before the first iteration. So both end now, however
    # late a rank is. All ranks that have SNIP have said so before it.
    dist.barrier()
    if store.add(f"snip/with_snip/{number}", 0) == num_ranks:
        return
    found = f"snip/without_snip/{number}"
    if is_first:  # one rank asks for all, the others read what it found
        keys = [f"snip/starts/{each}" for each in range(num_ranks)]
        without = [
            each
            for each, key in enumerate(keys)
            if not store.check([key]) or int(store.get(key)) < number
        ]
        store.set(found, json.dumps(without))
    without = json.loads(store.get(found))
    message = (
        f"--snip is missing on {ranks_text(runs_of(without))}; start all ranks with the same flags "
        "and files"
    )
    # A host's first rank shows the error, and may be one of those without SNIP.
    if rank == min(set(range(num_ranks)) - set(without)) and os.environ.get("LOCAL_RANK") != "0":
        logger.error("snip: %s", message)
    raise UsageError(message)


def refuse_differences(settings: Gathered) -> None:
    """All ranks: refuse settings that differ.

    Args:
        settings: `settings_of_rank`, `machine_of_rank` and `files_of_rank` of every rank.

    Raises:
        UsageError: one line with each setting that differs, its values and their ranks.
    """
    from megatron_snip.collectives import ranks_text

    differing = []
    for name in dict.fromkeys(name for each in settings.values for name in each):
        ranks_of: dict[str, list[range]] = {}
        for each, ranks in zip(settings.values, settings.ranks, strict=True):
            if name in each or _STAGE not in name:
                ranks_of.setdefault(each.get(name, "not there"), []).extend(ranks)
        if len(ranks_of) > 1:
            values = [
                f"{shortened(value, 80)} on {ranks_text(sorted(ranks, key=lambda run: run.start))}"
                for value, ranks in ranks_of.items()
            ]
            more = f", and {len(values) - MOST_SHOWN} more" if len(values) > MOST_SHOWN else ""
            differing.append(f"{name} is {', '.join(values[:MOST_SHOWN])}{more}")
    if not differing:
        return
    more = f"; {len(differing) - MOST_SHOWN} more" if len(differing) > MOST_SHOWN else ""
    raise UsageError(
        f"the ranks have other settings: {'; '.join(differing[:MOST_SHOWN])}{more}; start all "
        "ranks with the same flags, files and environment, on equal machines"
    )


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "empty"
    return str(value)
