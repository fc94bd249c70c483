"""Groups of linears to which `--snip-eval-precision groups` attributes the loss increase."""

from collections.abc import Iterable

from megatron_snip.types import split_linear_name

KINDS = ("attention", "mlp", "experts", "mamba", "others")
"""Groups by what a linear belongs to; each linear is in one of them."""

THIRDS = ("first_third", "middle_third", "last_third")
"""Groups by layer, in the model's order; each linear is in one of them."""


def linear_groups(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the linears of each group, without empty groups.

    Args:
        names: all linears, in the model's order.
    """
    names = list(names)
    layers = list(dict.fromkeys(split_linear_name(name)[:2] for name in names))
    groups: dict[str, list[str]] = {group: [] for group in (*KINDS, *THIRDS)}
    for name in names:
        groups[_kind(name)].append(name)
        index = layers.index(split_linear_name(name)[:2])
        groups[THIRDS[3 * index // len(layers)]].append(name)
    return {group: frozenset(members) for group, members in groups.items() if members}


def _kind(name: str) -> str:
    parts = name.split(".")
    if "experts" in parts:
        return "experts"
    # `self_attention`, `cross_attention`; in MTP they are below the layer.
    if any(part.endswith("attention") for part in parts):
        return "attention"
    if "mixer" in parts:
        return "mamba"
    return "mlp" if "mlp" in parts else "others"
