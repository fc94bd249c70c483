"""What test_te.py runs on ranks: Transformer Engine's linears beside Megatron's own.

Latent attention's down projections are whole on every tensor-parallel rank; they are compared with
those of a layout without tensor parallelism.

Transformer Engine's own Python is found before Megatron is imported.
"""

import tests.te_on_cpu.installed  # noqa: F401 - before anything that imports Megatron

# isort: split
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_snip.formats import Format
from megatron_snip.linears.discovery import current_topology
from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te.machine import measured_format, this_machine
from megatron_snip.trainer import model as trainer_model
from tests.distributed import frozen_runs
from tests.distributed.small_model import layout, refresh_json, save_random_plan
from tests.models import EXPERTS, FP32, build, copy_weights
from tests.te.observed import Seen, agree, observed

MODEL = {"bf16": True, "num_layers": 1, "seq_length": 128, "adam_eps": 1e-4, "train_iters": 10}
FORMATS = ("fp8", "fp4")
REFRESH = {"interval": 100, "start_step": 3, "lag": 1, "efficiency_target": 0.4, "formats": FORMATS}
LATENT = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 64,
    "rope_type": "rope",
}


def native(values: dict[str, Any]) -> dict[str, Any]:
    """On ranks: a refresh with either kind of linear, in the recipes of Transformer Engine."""
    return {te: _refresh({**MODEL, **values}, te=te == "te") for te in ("te", "local")}


def simulated(values: dict[str, Any]) -> dict[str, Any]:
    """On ranks: a refresh with either kind of linear, simulated."""
    return {
        te: _refresh({**MODEL, **values}, te=te == "te", backend="simulate")
        for te in ("te", "local")
    }


def frozen(values: dict[str, Any]) -> dict[str, Any]:
    """On ranks: training under a frozen plan, measured and not."""
    return {
        "with": _frozen({**MODEL, **values}, {"interval": 2, "start_step": 1}),
        "without": _frozen({**MODEL, **values}, {"start_step": 9}),
    }


def frozen_numbers(name: str) -> dict[str, Any]:
    """On ranks: a run of `frozen_runs` with Transformer Engine's linears."""
    with _linears(te=True):
        return frozen_runs.frozen(name)


def latent(values: dict[str, Any]) -> dict[str, Any]:
    """On ranks: a refresh of latent attention, tensor parallel and with two data ranks."""
    # In FP32, where losses can be compared closely, and NVFP4 cannot run. Transformer Engine's
    # attention wants the number of query groups.
    model = {**MODEL, "bf16": False, "num_query_groups": 4}
    options = {"formats": ("bf16", "fp8"), "multi_latent_attention": True}
    with _latent_attention():
        return {
            "split": _refresh({**model, **values}, te=True, **options),
            "unsplit": _refresh(model, te=True, **options),
        }


@contextmanager
def _latent_attention() -> Iterator[None]:
    """The trainer's models have latent attention; every rank's replicas start alike."""
    original = trainer_model.initialize_weights

    def initialize(chunk: torch.nn.Module, config: Any) -> None:
        for module in chunk.modules():
            if type(module) is TELinear:
                module.weight.tensor_model_parallel = False
        original(chunk, config)

    fields = [(name, Any, value) for name, value in LATENT.items()]
    config = dataclasses.make_dataclass("Latent", fields, bases=(MLATransformerConfig,))
    with (
        mock.patch.object(trainer_model, "TransformerConfig", config),
        mock.patch.object(trainer_model, "initialize_weights", initialize),
    ):
        yield


def _linears(te: bool, **spec_settings: Any) -> Any:
    """The trainer's layers, made of Transformer Engine's linears or of Megatron's own."""
    original = trainer_model.get_gpt_layer_local_spec

    def spec(**kwargs: Any) -> Any:
        if te:
            return get_gpt_layer_with_transformer_engine_spec(**spec_settings)
        return original(**kwargs)

    return mock.patch.object(trainer_model, "get_gpt_layer_local_spec", spec)


def _measured_as_te() -> Any:
    def formats(model: PlannedModel, names: Iterable[str]) -> dict[str, Format]:
        machine = this_machine(with_te=True)
        return {n: measured_format(n, "te", machine) for n in names if n != "bf16"}

    return mock.patch.object(PlannedModel, "measured_formats", formats)


def _refresh(
    values: dict[str, Any],
    te: bool,
    backend: str = "auto",
    formats: tuple[str, ...] = FORMATS,
    **spec_settings: Any,
) -> dict[str, Any]:
    """One refresh; for comparisons, Megatron's own linears are measured in the same recipes."""
    measured = _measured_as_te() if backend == "auto" else contextlib.nullcontext()
    with _linears(te, **spec_settings), measured, layout(values) as trainer:
        hook = trainer.controller({**REFRESH, "formats": formats, "backend": backend})
        trainer.advance(3, hook)
        modules = [linear.module for linear in hook.model.linears]
        for module in modules if te else []:
            module.seen.clear()
        trainer.advance(2, hook)
        table = hook.model.resolved(hook.plan, 3)
        hook.close()
        names = [linear.name for linear in hook.model.linears]
        return {
            **refresh_json(trainer, hook),
            "losses": trainer.losses[:3],
            "ran": {n: sorted(set(m.seen)) for n, m in zip(names, modules, strict=True)}
            if te and backend == "auto"
            else {},
            "precision": dataclasses.asdict(table),
        }


def _frozen(values: dict[str, Any], snip: dict[str, Any]) -> dict[str, Any]:
    file = Path(os.environ["TINY_RESULTS"]) / "plan.json"
    settings = {"collect_only": True, "plan_file": file, "formats": FORMATS}
    with _linears(te=True), layout(values) as trainer:
        save_random_plan(trainer, file, formats=FORMATS)
        controller = trainer.run(4, {**settings, **snip})
        return {
            **trainer.digests(),
            "refreshes": len(trainer.events.measured),
            "options": sorted({str(o) for o in controller.plan.linears.values()}),
            "ran": sorted(
                {words for each in controller.model.linears for words in each.module.seen}
            ),
        }


def experts() -> dict[str, Any]:
    """On two ranks: grouped experts dealt out, beside Megatron's own sequential ones."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    try:
        settings = {**EXPERTS, **FP32, "expert_model_parallel_size": 2}
        models = build(grouped=True, **settings), build(te=False, **settings)
        copy_weights(*models)
        topology = current_topology()
        found: list[Seen] = []
        for model in models:
            under = PlannedModel([model], topology, seed=0)
            under.install()
            found.append(observed(model, under))
            under.uninstall()
        agree(*found)
        tokens = {
            instance: [len(x) for x, _, _ in each]
            for instance, each in found[0].items()
            if ".experts.linear_fc1" in instance
        }
        return {"tokens": tokens, "rows": [info.name for info in under.job.linears]}
    finally:
        parallel_state.destroy_model_parallel()
