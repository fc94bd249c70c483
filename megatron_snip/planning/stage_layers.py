"""Which layers each pipeline stage holds: a fact of a run, in its problems and plans.

    "stage_layers": [[{"decoder.layers.0": 0, "decoder.layers.1": 1}, {"decoder.layers.3": 0}],
                     [{"decoder.layers.2": 0}, {"decoder.layers.4": 0, "mtp.layers.0": 0}]]

A list for each stage has a table for each of its model chunks: one, or several with interleaving.
A table has the layers with planned linears, and the number N of `layers.N` in the chunk. Megatron
counts it from 0 in each chunk, and its precision files match these names. A stage without such
layers has empty tables.
"""

import re
from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import ConfigDict, Field, RootModel, model_validator

from megatron_snip.errors import UsageError
from megatron_snip.files import Label

MAX_STAGE = 9999
"""Largest pipeline stage; a plan lists every stage up to the largest."""

_Number = Annotated[int, Field(ge=0, le=10**9)]
_Chunks = Annotated[tuple[dict[Label, _Number], ...], Field(min_length=1, strict=False)]
_Stages = Annotated[
    tuple[_Chunks, ...], Field(min_length=1, max_length=MAX_STAGE + 1, strict=False)
]

# The outermost layer: one of multi-token prediction may have layers of its own.
_OUTER = re.compile(r"(?P<block>[A-Za-z_][\w.]*?)\.layers\.\d{1,9}(?P<rest>\..+)?", re.ASCII)


def outer_layer(name: str) -> tuple[str, str, str]:
    """Return (layer, its block, rest) of a linear's name.

    `decoder.layers.2.mlp.linear_fc1` has `decoder.layers.2`, `decoder` and `.mlp.linear_fc1`.

    Raises:
        UsageError: if the name has no layer.
    """
    match = _OUTER.fullmatch(name)
    if match is None:
        raise UsageError(f"'{name}' has no layer; expected e.g. 'decoder.layers.17.mlp.linear_fc1'")
    rest = match["rest"] or ""
    return name.removesuffix(rest), match["block"], rest


class StageLayers(RootModel[_Stages]):
    """The layers of each model chunk of each pipeline stage; see the module's description.

    Raises:
        UsageError: if a name is no layer's, a layer is on two chunks, or two layers of a chunk have
            one number.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    @property
    def num_stages(self) -> int:
        """Pipeline-parallel size."""
        return len(self.root)

    def local_names(self, names: Iterable[str]) -> dict[str, tuple[int, str]]:
        """Return (stage, name in the model chunk) of each linear, by its name.

        Raises:
            UsageError: if a linear's layer is on no stage.
        """
        places = {
            layer: (stage, number)
            for stage, chunks in enumerate(self.root)
            for chunk in chunks
            for layer, number in chunk.items()
        }
        found = {}
        for name in names:
            layer, block, rest = outer_layer(name)
            if layer not in places:
                raise UsageError(f"'{name}': no pipeline stage holds {layer}")
            stage, number = places[layer]
            found[name] = (stage, f"{block}.layers.{number}{rest}")
        return found

    @model_validator(mode="after")
    def _check(self) -> Self:
        seen: set[str] = set()
        for chunk in (chunk for chunks in self.root for chunk in chunks):
            by_local_name: dict[str, str] = {}
            for layer, number in chunk.items():
                _, block, rest = outer_layer(layer)
                if rest:
                    raise UsageError(f"stage_layers: '{layer}' is no layer")
                if layer in seen:
                    raise UsageError(f"stage_layers: '{layer}' is listed twice")
                seen.add(layer)
                local = f"{block}.layers.{number}"
                other = by_local_name.setdefault(local, layer)
                if other != layer:
                    raise UsageError(
                        f"stage_layers: '{other}' and '{layer}' are both '{local}' in one chunk"
                    )
        return self
