"""Linears in which a low format may be slower than BF16, by the shape of a rank's weight.

Quantizing costs time in proportion to the tensors, and a GEMM's gain grows with N and K. The limits
(`GemmRecipe.small_shapes`) are those that torchao and torchtitan publish for FP8 training on H100,
with one scale per tensor and with one per row (pytorch/ao#2410, pytorch/torchtitan#1319). The ones
per row stand here for all recipes with smaller tiles, for which no limits are published. They are a
hint: `megatron-snip calibrate` and `--snip-cost time` measure.
"""

import math
from collections.abc import Mapping

from megatron_snip.linears.te.recipe_table import RECIPES


def small_linears(shapes: Mapping[str, tuple[int, int]], recipe: str) -> dict[str, str]:
    """Return {linear: why a recipe may be slower there than BF16}.

    Experts are left out: their GEMMs run grouped, and no limits are published for these.

    Args:
        shapes: (out_features N, in_features K) of the weight that a rank multiplies, by linear
            (`Job.shard_shapes`).
        recipe: name of a recipe of Transformer Engine; `bf16` is never slower.
    """
    found = {}
    for name, (n, k) in shapes.items():
        for largest_n, largest_k in RECIPES[recipe].small_shapes:
            if n <= largest_n and k <= largest_k and ".experts." not in name:
                limits = {"N": largest_n, "K": largest_k}
                text = " and ".join(f"{d} <= {x:g}" for d, x in limits.items() if x < math.inf)
                found[name] = f"N {n}, K {k} on a rank ({text})"
                break
    return found
