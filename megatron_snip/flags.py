"""Command-line flags made from a pydantic model: one group a section, one flag a field.

The flags carry no defaults (they are absent from the namespace unless given), so that whoever
reads them knows which were given, and lets these win over a YAML file.
"""

import argparse
import inspect
import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def flag_name(prefix: str, field: str) -> str:
    """Return the flag of a field: ("snip-", "eval_precision") gives `--snip-eval-precision`.

    The field `enabled` has the prefix as its flag.
    """
    return "--" + (prefix.rstrip("-") if field == "enabled" else prefix + field.replace("_", "-"))


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel], prefix: str = "") -> None:
    """Add a flag for every field of `model`, grouped by the section that declares it.

    Args:
        parser: receives one argument group a section.
        model: the settings; the docstrings of its fields become the help.
        prefix: put before every flag, e.g. `snip-`, and before every namespace attribute (`snip_`).
    """
    for section in (*model.__bases__, model):  # argparse hides a group without flags
        title = (section.__doc__ or section.__name__).splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title)
        for name in inspect.get_annotations(section):
            if name in model.model_fields:
                _add_flag(group, model.model_fields[name], name, prefix)


def given_values(
    namespace: argparse.Namespace, model: type[BaseModel], prefix: str = ""
) -> dict[str, Any]:
    """Return the fields of `model` that were given on the command line, by field name."""
    given = vars(namespace)
    dest = prefix.replace("-", "_")
    return {name: given[dest + name] for name in model.model_fields if dest + name in given}


def _add_flag(group: argparse._ArgumentGroup, field: FieldInfo, name: str, prefix: str) -> None:
    default = field.get_default(call_default_factory=True)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    text = " ".join((field.description or "").split()).replace("%", "%%")
    kind = core_type(field.annotation)
    how: dict[str, Any] = {"metavar": _metavar(kind)}  # pydantic converts and checks the text
    if kind is bool:
        how = {"action": argparse.BooleanOptionalAction}
    group.add_argument(
        flag_name(prefix, name),
        dest=prefix.replace("-", "_") + name,
        default=argparse.SUPPRESS,
        help=f"{text} [default: {shown if shown not in (None, '') else 'none'}]",
        **how,
    )


def core_type(annotation: Any) -> Any:
    """Strip Annotated and `| None`."""
    if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
        return core_type(typing.get_args(annotation)[0])
    return annotation


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(typing.get_args(kind)) + "}"
    if typing.get_origin(kind) is tuple:
        return "A,B,..."
    return {int: "N", float: "X", str: "NAME"}.get(kind, "PATH")
