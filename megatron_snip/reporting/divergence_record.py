"""DivergenceRecord: the divergences of one refresh as a run directory keeps them, without torch.

Read from divergences/<step>.json, which `divergence.quality.divergences_dict` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_snip.errors import UsageError
from megatron_snip.options import Option
from megatron_snip.planning.json_file import read_json

Kind = Literal["loss_divergence", "weight_divergence"]


@dataclass(frozen=True)
class LinearRow:
    """One linear.

    Attributes:
        name: layout-independent name.
        stage: pipeline stage.
        flops: FLOPs of its three GEMMs for one token.
        options: {option: {measure: value}}; None where a value could not be measured.
    """

    name: str
    stage: int
    flops: float
    options: dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class DivergenceRecord:
    """All linears at one iteration.

    Attributes:
        iteration: that was measured.
        linears: in the model's order.
    """

    iteration: int
    linears: tuple[LinearRow, ...]

    @property
    def uniform_options(self) -> tuple[str, ...]:
        """Options with one format in all three GEMMs, in the order offered."""
        first = self.linears[0].options if self.linears else {}
        return tuple(name for name in first if len(set(Option.parse(name).formats)) == 1)

    def values(self, option: str, kind: Kind) -> dict[str, float | None]:
        """Return {linear: value} of one option."""
        return {row.name: row.options.get(option, {}).get(kind) for row in self.linears}


def read_divergences(path: Path) -> DivergenceRecord:
    """Read a divergences file.

    Raises:
        UsageError: if the file is missing, not JSON, or of another form; one line.
    """
    return divergence_record(read_json(path, "divergences file"), f"divergences file '{path}'")


def divergence_record(value: Any, source: str = "divergences") -> DivergenceRecord:
    """Build from the file's object.

    Raises:
        UsageError: one line that names `source`.
    """
    if not isinstance(value, Mapping) or value.get("version") not in (1, 2):
        raise UsageError(f"{source} is not a divergences file of version 1 or 2")
    try:
        rows = tuple(_row(entry) for entry in value["linears"])
        return DivergenceRecord(_iteration(value), rows)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{source} is damaged ({type(error).__name__}: {error})") from None


def _iteration(value: Mapping[str, Any]) -> int:
    return int(value["step"]) + 1 if value["version"] == 1 else int(value["iteration"])


def _row(entry: Any) -> LinearRow:
    options = {
        str(Option.parse(option)): {
            key: None if value is None else float(value) for key, value in measures.items()
        }
        for option, measures in entry["options"].items()
    }
    return LinearRow(str(entry["name"]), int(entry["stage"]), float(entry["flops"]), options)
