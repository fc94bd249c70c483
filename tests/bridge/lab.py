"""Two recipes of Megatron-Bridge, shrunk, under several layouts; runs are made once and shared."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bridge.hub import write_hub
from tests.distributed.launch import ROOT, TIMEOUT_S, Run, Server, free_port

SCRIPT = str(ROOT / "tests" / "bridge" / "train_recipe.py")

ON_CPU = """
    dist.distributed_backend=gloo model.use_cpu_initialization=true
    model.gradient_accumulation_fusion=false model.masked_softmax_fusion=false
    model.bias_activation_fusion=false model.bias_dropout_fusion=false
    model.apply_rope_fusion=false model.cross_entropy_loss_fusion=false
    model.persist_layer_norm=false checkpoint.async_save=false
"""
"""What `--cpu` sets."""

SNIP = ["--snip", "--snip-interval", "4", "--snip-start-step", "3", "--snip-lag", "2"]
SNIP += ["--snip-efficiency-target", "0.5", "--snip-backend", "simulate"]
"""Refreshes at iterations 3 and 7; plans are applied before iterations 5 and 9."""

COLLECT_ONLY = [*SNIP, "--snip-collect-only"]
"""Measures as often, and stays in BF16."""

LAYOUTS = {
    "llama-tp2": ["llama", "model.tensor_model_parallel_size=2"],
    "llama-pp2": ["llama", "model.pipeline_model_parallel_size=2", "model.pipeline_dtype=bf16"],
    "moe-ep2": ["moe", "model.expert_model_parallel_size=2"],
}
"""A recipe and its overrides, for two ranks."""

CURRENT_SCALING = "bf16_with_fp8_current_scaling_mixed"
"""FP8 of Hopper, with BF16 in the first and the last layer."""

QUANT_RECIPE = {
    "configs": {
        "wide": {
            "transformer_engine_config_type": "TEQuantizationParams",
            "training_recipe": {"fp8_quantization_recipe": None, "fp4_quantization_recipe": None},
        }
    },
    "matchers": {
        "one": {
            "type": "glob",
            "pattern": "decoder.layers.1.mlp.linear_fc2",
            "config": "wide",
            "enabled": True,
        }
    },
}
"""Of `model.quant_recipe`: one linear stays BF16."""

OF_JOB = ["model.use_te_rng_tracker=true", "rng.te_rng_tracker=true"]
"""Graphs need it, and it changes the first weights."""


def of_job() -> dict[str, str]:
    """The environment of a job in `CURRENT_SCALING` and with `QUANT_RECIPE`."""
    return {"TINY_PRECISION": CURRENT_SCALING, "TINY_QUANT": json.dumps(QUANT_RECIPE)}


class Lab:
    """Runs the training in many ways, each once."""

    def __init__(self, folder: Path, *packages: Path) -> None:
        """Write to `folder`; ranks import from `packages` before all others."""
        self.folder = folder
        write_hub(folder / "hub")
        os.environ["HF_HUB_CACHE"] = str(folder / "hub")  # ranks inherit it
        self._server = Server(*packages, preload=["tests.bridge.script"])
        self._runs: dict[Any, Run] = {}

    def run(
        self,
        layout: str,
        words: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        plain: bool = False,
    ) -> Run:
        """Return how a run on two ranks ended; `plain` is without this package's runner.

        Args:
            layout: of `LAYOUTS`.
            words: further overrides and flags.
            environment: of the ranks.
            plain: whether Python runs the script itself.
        """
        environment = environment or {}
        case = (layout, *words, *sorted(environment.items()), plain)
        if case not in self._runs:
            output = self.folder / f"run-{len(self._runs)}"
            to = ["--snip-output-dir", str(output)] if "--snip" in words else []
            line = [SCRIPT, *LAYOUTS[layout], *words, *to]
            line = [*line, *ON_CPU.split()] if plain else ["--cpu", *line]
            run = self.run_words(line, environment, plain)
            self._runs[case] = dataclasses.replace(run, output=output)
        return self._runs[case]

    def run_words(
        self,
        words: Sequence[str],
        environment: dict[str, str] | None = None,
        plain: bool = False,
        ranks: int = 2,
    ) -> Run:
        """Run `python -m megatron_snip WORDS`, or `python WORDS` with the CPU patch alone."""
        given = {**(environment or {}), "MASTER_PORT": str(free_port())}
        arguments = {"words": words, "environment": given, "plain": plain}
        return self._server.run(ranks, "tests.bridge.script:run_script", arguments, TIMEOUT_S)

    def close(self) -> None:
        self._server.close()


def saving(directory: Path) -> list[str]:
    """Overrides that save after iteration 7 and at the end; `--cpu` makes the saves wait."""
    return [f"checkpoint.save={directory}", "checkpoint.async_save=true"]


def weights(run: Run) -> list[str]:
    """The digest of every rank's weights at the end of a run that ended well."""
    return [result["weights"] for result in run.finished()]


def losses(run: Run) -> list[list[str]]:
    """Losses and norms of every iteration, by rank."""
    return [result["losses"] for result in run.finished()]
