"""A validator of JSON Schemas, for what the project's schemas use; other keywords are an error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_snip.cli.schema import SCHEMAS, schema
from megatron_snip.files import parse_json, read_json, read_yaml

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_LIMITS = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "maxLength": lambda value, limit: len(value) <= limit,
    "minLength": lambda value, limit: len(value) >= limit,
    "minItems": lambda value, limit: len(value) >= limit,
    "maxItems": lambda value, limit: len(value) <= limit,
    "minProperties": lambda value, limit: len(value) >= limit,
    "enum": lambda value, allowed: value in allowed,
    "const": lambda value, allowed: value == allowed,
}
_NOTES = {
    "$schema",
    "type",
    "$defs",
    "title",
    "description",
    "default",
    "format",
    "additionalProperties",
}


def faults(value: Any, rules: Any, root: dict[str, Any], at: str = "$") -> Iterator[str]:
    """Yield a line for each place where a value breaks a schema."""
    if rules is False:
        yield f"{at}: not allowed"
    if isinstance(rules, bool):
        return
    if "type" in rules:
        expected = rules["type"]
        is_bool_as_number = isinstance(value, bool) and expected in ("integer", "number")
        if is_bool_as_number or not isinstance(value, _TYPES[expected]):
            yield f"{at}: {value!r:.40} is no {expected}"
            return
    for keyword, rule in rules.items():
        if keyword == "$ref":
            yield from faults(value, root["$defs"][rule.rpartition("/")[2]], root, at)
        elif keyword == "anyOf":
            if all(list(faults(value, each, root, at)) for each in rule):
                yield f"{at}: fits none of {len(rule)} schemas"
        elif keyword == "required":
            yield from (f"{at}: no {name}" for name in rule if name not in value)
        elif keyword == "properties":
            for name, each in value.items():
                inner = rule.get(name, rules.get("additionalProperties", True))
                yield from faults(each, inner, root, f"{at}.{name}")
        elif keyword == "propertyNames":
            for name in value:
                yield from faults(name, rule, root, f"{at} (name)")
        elif keyword in ("items", "prefixItems"):
            for i, each in enumerate(value):
                inner = rule if keyword == "items" else rule[i]
                yield from faults(each, inner, root, f"{at}[{i}]")
        elif keyword in _LIMITS:
            if not _LIMITS[keyword](value, rule):
                yield f"{at}: {value!r:.40} breaks {keyword} {rule}"
        else:
            assert keyword in _NOTES, f"the validator does not know '{keyword}'"
    if "properties" not in rules and "additionalProperties" in rules:
        for name, each in value.items():
            yield from faults(each, rules["additionalProperties"], root, f"{at}.{name}")


def check(name: str, value: Any) -> None:
    """Assert that a value is what the schema of a file says."""
    made = schema(name)
    assert list(faults(value, made, made)) == []


def check_run(directory: Path) -> dict[str, int]:
    """Check every file of a run against its schema; return how many files each kind has."""
    found: dict[str, int] = {}
    for name, each in SCHEMAS.items():
        pattern = each.path.partition(";")[0].partition(",")[0].replace("<iteration>", "*")
        for path in directory.glob(pattern):
            if path.suffix == ".yaml":
                values = [read_yaml(path)]
            elif path.suffix == ".jsonl":
                values = [parse_json(line, str(path)) for line in path.read_text().splitlines()]
            else:
                values = [read_json(path, name)]
            for value in values:
                check(name, value)
            found[name] = found.get(name, 0) + 1
    return found
