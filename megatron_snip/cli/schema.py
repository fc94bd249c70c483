"""`megatron-snip schema`: the JSON Schema of a file that SNIP writes, made from its record."""

import argparse
import json
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter

from megatron_snip.cli.common import new_table
from megatron_snip.config import SnipConfig
from megatron_snip.output import console
from megatron_snip.planning.calibration import CalibrationTable
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.reporting.metrics_file import MetricsRow
from megatron_snip.reporting.precision_record import PrecisionRecord
from megatron_snip.reporting.run_record import Divergences
from megatron_snip.statistics.health_table import HealthTable

EXAMPLES = ("megatron-snip schema", "megatron-snip schema plan > plan.schema.json")

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _FixedBySource(BaseModel):
    linears: int
    example: str


class _RunConfig(BaseModel):
    """The settings of a run; those of the training loop beside SNIP's have any form."""

    snip: SnipConfig
    fixed: dict[str, _FixedBySource] = {}


@dataclass(frozen=True)
class FileSchema:
    """A kind of file.

    Attributes:
        path: Where a run writes it, or what writes it.
        record: What reads it.
        version: Its `version`, where the record has none.
    """

    path: str
    record: Any
    version: int | None = None


SCHEMAS = {
    "config": FileSchema("config.yaml", _RunConfig),
    "versions": FileSchema("versions.json", dict[str, str | None]),
    "metrics": FileSchema("metrics.jsonl, each line", MetricsRow),
    "problem": FileSchema("problems/<iteration>.json", PlanningProblem),
    "plan": FileSchema("plans/<iteration>.json", PrecisionPlan),
    "precision": FileSchema("precision/<iteration>.json", PrecisionRecord, 3),
    "divergences": FileSchema("divergences/<iteration>.json", Divergences, 3),
    "health": FileSchema("health/<iteration>.json", HealthTable, 2),
    "calibration": FileSchema("calibration.json; megatron-snip calibrate", CalibrationTable),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    text = "the file; without it, the names are printed"
    parser.add_argument("name", metavar="NAME", choices=list(SCHEMAS), nargs="?", help=text)


def run(args: argparse.Namespace) -> int:
    """Print a schema, or the names of all; return 0."""
    if args.name is not None:
        print(json.dumps(schema(args.name), indent=1))
        return 0
    table = new_table(("name", "file"))
    for name, each in SCHEMAS.items():
        table.add_row(name, each.path)
    console().print(table)
    return 0


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a file, by its name in `SCHEMAS`.

    Keys that it does not list are allowed where the reader ignores them.
    """
    file = SCHEMAS[name]
    made = TypeAdapter(file.record).json_schema()
    _describe_properties(made)
    if file.version is not None:
        properties = made.setdefault("properties", {})
        properties["version"] = {**properties.get("version", {}), "const": file.version}
    if "version" in made.get("properties", {}):  # a reader refuses a file without it
        made["required"] = list(dict.fromkeys(["version", *made.get("required", ())]))
    return {"$schema": DIALECT, **made, "title": f"{name}: {file.path}"}


def _describe_properties(made: Any) -> None:
    """Move what docstrings say of attributes to the properties; in place, at any depth."""
    if isinstance(made, list):
        for each in made:
            _describe_properties(each)
    if not isinstance(made, dict):
        return
    text = made.get("description")
    if isinstance(text, str):
        made["description"] = re.split(r"\n\n(?:Raises|Attributes):", text)[0]
        section = re.search(r"\n\nAttributes:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL)
        entries = re.split(
            r"^ {4}(?=\w)", "" if section is None else section[1], flags=re.MULTILINE
        )
        for entry in entries:
            name, _, meaning = entry.partition(": ")
            if name in made.get("properties", {}):
                made["properties"][name].setdefault("description", " ".join(meaning.split()))
    for each in list(made.values()):
        _describe_properties(each)
