"""Every file in configs/ loads and is the model that was published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron_snip.cli.commands import build_parser
from megatron_snip.cli.script import expand
from megatron_snip.cli.train import read_settings
from megatron_snip.config import SnipConfig, make_config, read_yaml
from megatron_snip.linears.discovery import current_topology, find_linears
from megatron_snip.patches import cpu
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.model import transformer_config
from megatron_snip.trainer.session import check_run

FOLDER = Path(__file__).parents[2] / "configs"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
RUNS = sorted(FOLDER.glob("*.yaml"))
INTENTS = sorted(path.stem for path in (FOLDER / "snip").iterdir())


@dataclass(frozen=True)
class Published:
    """A model as its authors describe it.

    Attributes:
        parameters: of the published weights.
        layers, hidden, ffn, heads, groups, vocabulary: of its configuration.
        parallel: files of parallel sizes, and GPUs.
        experts, active: of a mixture of experts.
    """

    parameters: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    parallel: dict[str, int]
    experts: int = 1
    active: int = 1

    @property
    def linear_flops_per_token(self) -> float:
        """6 FLOPs for each weight that a token meets: q, k, v, o, and the experts' three."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.groups * head
        mlp = 3 * self.hidden * self.ffn * self.active
        return 6.0 * self.layers * (attention + mlp)


DATA = {"data": 8}
MODELS = {
    "tinyllama-1.1b": Published(1_100_048_384, 22, 2048, 5632, 32, 4, 32000, DATA),
    "open-llama-3b": Published(3_426_473_600, 26, 3200, 8640, 32, 32, 32000, DATA),
    "open-llama-7b": Published(6_738_415_616, 32, 4096, 11008, 32, 32, 32000, DATA),
    "llama-70b": Published(
        70_553_706_496,
        80,
        8192,
        28672,
        64,
        8,
        128256,
        {"llama-70b-8gpus": 8, "llama-70b-64gpus": 64},
    ),
    "mixtral-8x7b": Published(
        46_702_792_704,
        32,
        4096,
        14336,
        32,
        8,
        32000,
        {"mixtral-8x7b-8gpus": 8},
        experts=8,
        active=2,
    ),
}
LAYOUTS = [(name, layout) for name, model in MODELS.items() for layout in model.parallel]


def argument_file(folder: str, name: str) -> str:
    return f"@{FOLDER / folder / name}.args"


FIXED = ("--swiglu", "--disable-bias-linear", "--group-query-attention")
FIXED_VALUES = ("--normalization", "--position-embedding-type", "--max-position-embeddings")


def settings(name: str, layout: str | None = None, *words: str) -> TrainConfig:
    """Read Megatron's flags as settings of the trainer, which fixes some of them."""
    files = [argument_file("models", name)]
    if layout is not None:
        files.append(argument_file("parallel", layout))
    flags = [word for word in expand(files) if word not in FIXED]
    for fixed in FIXED_VALUES:
        at = flags.index(fixed)
        del flags[at : at + 2]
    at = flags.index("--tokenizer-type")
    assert flags[at + 1] == "NullTokenizer"  # it adds the end of document to the vocabulary
    del flags[at : at + 2]
    at = flags.index("--vocab-size") + 1
    flags[at] = str(int(flags[at]) + 1)
    return read_settings(build_parser("train").parse_args(["train", *flags, *words]))


# ---- files ------------------------------------------------------------------------------------


def test_every_file_is_looked_at() -> None:
    yaml = {
        *(path.name for path in RUNS),
        *(f"snip/{name}.yaml" for name in INTENTS),
    }
    layouts = {layout for model in MODELS.values() for layout in model.parallel}
    arguments = {f"models/{name}.args" for name in MODELS}
    arguments |= {f"parallel/{name}.args" for name in layouts}
    assert {str(path.relative_to(FOLDER)) for path in FILES} == yaml | arguments


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_loads(path: Path) -> None:
    config = make_train_config({**read_yaml(path), "run_dir": "runs/never-made"})
    check_run(config, config.model_parallel_size)


@cache
def intent(name: str) -> SnipConfig:
    return make_config(read_yaml(FOLDER / "snip" / f"{name}.yaml"))


def test_intents_go_from_careful_to_bold() -> None:
    assert INTENTS == ["aggressive", "balanced", "collect-only", "conservative"]
    careful, middle, bold = map(intent, ("conservative", "balanced", "aggressive"))
    assert careful.efficiency_target < middle.efficiency_target < bold.efficiency_target
    assert careful.interval > middle.interval > bold.interval
    assert careful.start_step > middle.start_step > bold.start_step
    assert all(config.enabled for config in (careful, middle, bold))
    watching = intent("collect-only")
    assert watching.enabled and watching.collect_only


# ---- models -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    installed = cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        if installed:
            cpu.uninstall()


@cache
def linear_flops(name: str) -> float:
    """Build Megatron's model without memory for it; return the FLOPs of its linears per token."""
    config = settings(name)
    transformer = transformer_config(config)
    transformer.use_cpu_initialization, transformer.perform_initialization = True, False
    spec = get_gpt_layer_local_spec(num_experts=config.num_experts, normalization="RMSNorm")
    with torch.device("meta"):
        model = GPTModel(
            transformer,
            spec,
            vocab_size=config.padded_vocab_size,
            max_sequence_length=config.seq_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
        )
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == MODELS[name].parameters
    found = find_linears([model], current_topology())
    linears = {place.name: place for _, places in found for place in places}  # experts share one
    return sum(place.info.flops_per_token for place in linears.values())


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_model_is_the_published_one(name: str, layout: str, megatron: None) -> None:
    model, gpus = MODELS[name], MODELS[name].parallel[layout]
    config = settings(name, layout, "--run-dir", "runs/never-made")
    check_run(config, gpus)
    # Megatron pads to a multiple of make_vocab_size_divisible_by x tensor ranks: to the same.
    unit = config.make_vocab_size_divisible_by * config.tensor_model_parallel_size
    assert config.padded_vocab_size == model.vocabulary
    assert model.vocabulary % unit == 0
    assert (config.num_experts or 1, config.moe_router_topk if config.num_experts else 1) == (
        model.experts,
        model.active,
    )
    assert linear_flops(name) == model.linear_flops_per_token


def test_both_programs_read_the_same_settings() -> None:
    file = str(FOLDER / "snip" / "aggressive.yaml")
    config = settings("tinyllama-1.1b", None, "--snip-config", file, "--snip-interval", "70")
    expected = intent("aggressive").model_copy(update={"interval": 70, "formats": ("fp8", "fp4")})
    assert config.snip == expected
