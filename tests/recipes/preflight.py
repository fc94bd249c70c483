"""What preflight answers for each published recipe, with a small model of its kind.

preflight.json holds the answers; this writes it:

    python -c 'import tests.te_on_cpu.installed, tests.recipes.preflight as p; p.write()'
"""

import json
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_snip.patches.preflight.examine import Preflight, examine
from megatron_snip.patches.preflight.job import BuiltJob
from megatron_snip.patches.preflight.world import World, gpu_of
from tests.models import EXPERTS, build
from tests.recipes import load
from tests.te_on_cpu.capability import forget

ANSWERS = Path(__file__).with_name("preflight.json")
SHAPES: dict[str, Any] = {
    "hidden_size": 1024,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "use_cpu_initialization": False,
    "init_model_with_meta_device": True,
}
JOB = {"micro_batch_size": 1, "global_batch_size": 128, "seq_length": 4096, "train_iters": 100}
SHAPING = {
    *("fp8", "fp8_recipe", "fp8_param", "fp4", "fp4_recipe", "fp4_param", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "mtp_num_layers"),
    *("tensor_model_parallel_size", "sequence_parallel"),
}
"""Settings with which the model is built. Its config gets the others then: some need a package of a
GPU's, another model or a later Megatron."""


def examined(name: str, args: Namespace) -> Preflight:
    """What preflight finds for a recipe, on the GPU in its name."""
    given = dict(vars(args))
    for kind in ("fp8", "fp4"):
        given[f"{kind}_param"] = given.get(f"{kind}_param_gather", False)
    edges = sum(int(given.get(f"num_layers_at_{end}_in_bf16", 0)) for end in ("start", "end"))
    shapes = {**SHAPES, **{k: v for k, v in given.items() if k in SHAPING}}
    shapes["num_layers"] = edges + 2
    shapes["sequence_parallel"] = (
        "sequence_parallel" in given and args.tensor_model_parallel_size > 1
    )
    is_moe = "moe_grouped_gemm" in given
    if is_moe:
        shapes |= {**EXPERTS, "moe_ffn_hidden_size": 512}
    vars(args).update(JOB, num_layers=edges + 2)
    tensor = int(args.tensor_model_parallel_size)
    world = World(2 * tensor)

    def chunks() -> list[Any]:
        model = build(grouped=is_moe, **shapes)
        known = {field.name for field in fields(TransformerConfig)}
        vars(model.config).update({k: v for k, v in given.items() if k in known})
        return [model]

    job = BuiltJob(None, {}, args, world=world)
    with gpu_of((9, 0) if "h100" in name else (10, 0)), world.installed():
        forget()
        world.start(tensor_model_parallel_size=tensor)
        job.build(chunks)
        return examine(job)


def answer(found: Preflight) -> dict[str, Any]:
    """What is compared of it."""
    target = {name: round(value, 4) for name, value in found.target.items() if value is not None}
    return {
        "refused": found.refused,
        "only_measures": found.only_measures,
        "formats": found.formats,
        "fixed": {source: row["linears"] for source, row in found.fixed.items()},
        "job": {option: round(share, 4) for option, share in found.job.items()},
        "target": target,
    }


def answers() -> dict[str, Any]:
    """What preflight answers for each recipe; those with the same settings are asked once."""
    known: dict[str, dict[str, Any]] = {}
    found = {}
    for name, args in load():
        gpu = "h100" if "h100" in name else "blackwell"
        key = f"{gpu} {sorted(vars(args).items(), key=str)}"
        if key not in known:
            known[key] = answer(examined(name, args))
        found[name] = known[key]
    return found


def write(path: Path = ANSWERS) -> None:
    """Write what preflight answers now."""
    path.write_text(json.dumps(answers(), indent=1) + "\n")
