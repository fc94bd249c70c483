"""What every linear runs under a plan: precision/<iteration>.json, schema version 3.

A plan names options. The backend, the machine, Transformer Engine and the job decide what runs.
Version 2 lacks `unused_rules`; it is still read.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megatron_snip.files import Label, read_json, read_record

_Iteration = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True)
class LinearPrecision:
    """What one linear runs. Where ranks or experts differ, values are joined by ` / `.

    Attributes:
        name: name of the linear.
        option: what the plan gives it.
        recipe: what runs it: `megatron` (its own BF16 GEMMs), `simulated`, or Transformer Engine's
            recipe.
        backend: `simulate` or `te`.
        weight_storage: dtype of the parameter between steps, or the class of a quantized one.
        fixed: what fixes its option (`planning.fixed.Source`); None: the planner chooses it.
    """

    name: Label
    option: Label
    recipe: Label
    backend: Label
    weight_storage: Label
    fixed: Label | None

    def __str__(self) -> str:
        """Return all but the name in a line."""
        storage = f"weights in {self.weight_storage}"
        source = "chosen by the plan" if self.fixed is None else f"fixed by {self.fixed}"
        return f"{self.option} ({self.backend}: {self.recipe}), {storage}, {source}"


@dataclass(frozen=True)
class PrecisionRecord:
    """What all linears of the model run from an iteration on; the same on all ranks.

    Attributes:
        version: version of the schema.
        iteration: the first iteration that runs it.
        plan_iteration: the plan's file: plans/<plan_iteration>.json.
        plan_digest: the plan's.
        linears: in the plan's order.
        unused_rules: rules that decide for no linear, each with what it belongs to:
            `--te-precision-config-file: mtp.* (bf16)`.
    """

    version: int = field(default=3, kw_only=True)
    iteration: _Iteration
    plan_iteration: _Iteration
    plan_digest: Label
    linears: tuple[LinearPrecision, ...]
    unused_rules: tuple[Label, ...] = ()

    def summary(self) -> list[str]:
        """Return a line for all linears that run the same, the largest number first."""
        first = {str(each): each.name for each in reversed(self.linears)}
        counts = Counter(map(str, self.linears))
        return [
            f"{count} linears: {text}, such as {first[text]}"
            for text, count in counts.most_common()
        ]

    def overview(self) -> dict[str, Any]:
        """Return what a dashboard shows, as plain values: some lines for any number of linears."""
        return {
            "iteration": self.iteration,
            "plan_iteration": self.plan_iteration,
            "plan_digest": self.plan_digest,
            "linears": self.summary(),
            "unused_rules": list(self.unused_rules),
        }


def parse_precision(value: Any, source: str = "precision record") -> PrecisionRecord:
    """Build from the file's JSON object.

    Raises:
        UsageError: one line that names `source`.
    """
    return read_record(PrecisionRecord, value, source, version=3, older=2)


def read_precision(path: Path) -> PrecisionRecord:
    """Read a precision file.

    Raises:
        UsageError: if the file is missing, not JSON, or damaged; one line.
    """
    return parse_precision(read_json(path, "precision file"), f"precision file '{path}'")
