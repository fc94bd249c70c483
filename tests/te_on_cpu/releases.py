"""What plans run under a release of Transformer Engine, as a line of JSON: its column -> answer.

    python -m tests.te_on_cpu.releases 2.14.0

Each answer comes from a model that trained a step under a plan, and from one that recomputed its
activations. `runs`: every GEMM multiplied the plan's formats, and recomputing changed no loss and
no gradient. `refused`: SNIP allows it for no linear. An error ends the process.
"""

import json
import sys
from typing import Any

from tests import te_on_cpu

if __name__ == "__main__":  # before anything that imports Megatron
    te_on_cpu.install(release=sys.argv[1])

import torch

from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import Option
from megatron_snip.topology import Topology
from tests import models
from tests.te_on_cpu import capability

MIXED = "mxfp8-mxfp8-bf16"
PADDED = {"grouped": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", **models.EXPERTS}
HOPPER = (9, 0)
BLACKWELL = (10, 0)
COLUMNS: dict[str, tuple[tuple[int, int], str, dict[str, Any]]] = {
    "current scaling": (HOPPER, "fp8_tensorwise", {}),
    "delayed scaling": (HOPPER, "fp8", {"fp8": "hybrid", "fp8_recipe": "delayed"}),
    "blockwise": (HOPPER, "fp8_blockwise", {}),
    "MXFP8": (BLACKWELL, "mxfp8", {}),
    "NVFP4": (BLACKWELL, "nvfp4", {}),
    "MXFP8, grouped experts": (BLACKWELL, "mxfp8", PADDED),
    "formats per GEMM": (BLACKWELL, MIXED, {}),
    "the same, grouped experts": (BLACKWELL, MIXED, PADDED),
}
"""The GPU, the option of a plan and the job's model."""
WORDS = {"fp8_tensorwise": "tensorwise", "fp8": "delayed", "fp8_blockwise": "blockwise"}
"""What a format is called in `module.seen`, where that is another name."""


RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def answer(option: Option, changes: dict[str, Any]) -> str:
    """Train a step in which linears run the option, and one that recomputes activations."""
    plain = trained(option, changes)
    recomputed = trained(option, changes | RECOMPUTED)
    assert len(plain) == len(recomputed) and all(map(torch.equal, plain, recomputed)), option
    return "runs" if plain else "refused"


def trained(option: Option, changes: dict[str, Any]) -> list[torch.Tensor]:
    """Return losses and gradients of a step in which linears run the option; empty if none can.

    If there are experts, their linears alone.
    """
    model = models.build(**changes)
    under = PlannedModel([model], Topology(), seed=7)
    under.install()
    is_grouped = "grouped" in changes
    chosen = [x for x in under.linears if not is_grouped or ".experts." in x.name]
    if all(linear.refusal(option) for linear in chosen):
        return []
    names = {linear.name for linear in chosen}
    under.apply(models.assignment(under, lambda name: str(option) if name in names else "bf16"))
    loss = torch.tensor(models.losses(model))
    seen = {formats for linear in chosen for formats in linear.module.seen}
    wanted = tuple(WORDS.get(name, name) for name in option.formats)
    assert seen == {wanted}, (option, seen)
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]


def main() -> None:
    found = {}
    with models.alone("gloo"):
        for column, (gpu, option, changes) in COLUMNS.items():
            with capability.on(gpu):
                found[column] = answer(Option.parse(option), changes)
    print("RELEASE" + json.dumps(found))


if __name__ == "__main__":
    main()
