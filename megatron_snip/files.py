"""Strict JSON and YAML in, values checked against a record, atomic files out.

Reading refuses NaN, Infinity, deep nesting, devices, pipes, files above `MAX_BYTES`, and in YAML
duplicate keys. Writing goes to a temporary file in the same directory, then fsync, then rename: a
reader sees the old file or the new one, never a part.
"""

import base64
import contextlib
import errno
import json
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import core_schema, from_json, to_jsonable_python

from megatron_snip.errors import UsageError, did_you_mean, one_line, shortened

T = TypeVar("T")

MAX_BYTES = 1 << 28
"""256 MiB; a problem with a million options is smaller."""

_READ_BYTES = 1 << 20
_MAX_YAML_BYTES = 1 << 20
_MAX_NUMBER = 400
_MAX_LABEL = 500


def _printable_label(text: str) -> str:
    if not text.isprintable():  # tables, logs and comments show it
        raise ValueError(f"the name {text!r} is not printable")
    return text


Label = Annotated[str, Field(max_length=_MAX_LABEL), AfterValidator(_printable_label)]
"""A name in a file's record."""
_MAX_DEPTH = 32
_MAX_ALIASES = 8


def read_text(
    path: Path,
    source: str,
    max_bytes: int = MAX_BYTES,
    plain: bool = False,
    errors: str = "strict",
) -> str:
    """Read a UTF-8 text file that is not trusted.

    Args:
        path: the file.
        source: how error messages call it.
        max_bytes: the largest size that is read.
        plain: whether a link is refused: for files that the user does not name.
        errors: what becomes of bytes that are not UTF-8, as in `bytes.decode`.

    Raises:
        UsageError: if it cannot be read, is not a regular file (a device or a pipe may never
            end), is larger than `max_bytes`, or is not UTF-8.
    """
    opener = _open_plain if plain else _open_without_waiting
    try:
        with open(path, "rb", buffering=0, opener=opener) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"{source} is not a regular file")
            data = bytearray()
            # Files of /proc have no size.
            while status.st_size <= max_bytes and len(data) <= max_bytes:
                part = os.read(stream.fileno(), _READ_BYTES)
                if not part:
                    return data.decode("utf-8", errors)
                data += part
        raise UsageError(f"{source} is larger than {max_bytes >> 20} MiB")
    except UnicodeDecodeError:
        raise UsageError(f"{source} is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        if plain and getattr(error, "errno", None) == errno.ELOOP:
            reason = "it is a link, and these are not followed here"
        raise UsageError(f"cannot read {source}: {reason}") from None


def read_json(path: Path, what: str, plain: bool = False) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        what: the kind of file for error messages, e.g. `problem file`.
        plain: as in `read_text`.

    Raises:
        UsageError: for the reasons of `read_text` and `parse_json`; one line.
    """
    source = f"{what} '{path}'"
    return parse_json(read_text(path, source, plain=plain), source)


def parse_json(text: str, source: str) -> Any:
    """Return the value of a JSON document.

    Of a key that is given twice, the last value counts. A number beyond a double's range (1e999) is
    read as infinity, which the records of our files refuse.

    Args:
        text: the document.
        source: how error messages call it.

    Raises:
        UsageError: if it is not JSON, is nested too deeply, or holds NaN, Infinity or a number of
            thousands of digits; one line.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise UsageError(f"{source} is not valid JSON: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping safely.

    Raises:
        UsageError: if the file is missing, is not YAML, holds a key twice, is nested or aliased
            beyond what settings need, or does not hold a mapping.
    """
    source = f"'{path}'"
    text = read_text(path, source, _MAX_YAML_BYTES)
    try:
        _check_shape(text, source)
        loaded = yaml.load(text, Loader=_UniqueKeys)
    # Besides its own errors, values that do not fit their tags: a 13th month, `!!bool maybe`.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UsageError(f"{source} is not valid YAML: {one_line(error)}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise UsageError(f"{source} must hold a mapping of settings, got {type(loaded).__name__}")
    return loaded


def _check_shape(text: str, source: str) -> None:
    """Refuse what costs far more time or memory than its length says, before it is built."""
    aliases = 0
    anchors: list[str | None] = []  # of the collections that are open
    for event in yaml.parse(text, Loader=_UniqueKeys):
        if isinstance(event, yaml.CollectionStartEvent):
            anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchors.pop()
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            if event.anchor in anchors:
                raise UsageError(f"{source}: '*{shortened(str(event.anchor), 80)}' contains itself")
        if len(anchors) > _MAX_DEPTH:
            raise UsageError(f"{source} is nested deeper than {_MAX_DEPTH} levels")
        if aliases > _MAX_ALIASES:
            raise UsageError(f"{source} has more than {_MAX_ALIASES} aliases")


class _UniqueKeys(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that is given twice, of which YAML would silently take the last.

    Numbers are those of YAML 1.2. In PyYAML's 1.1, 0100 is 64, 0:0 is 0 (of base 60), 1e-4 is a
    text and 2026-11-28 a date. A number of more characters than any double has is refused: Python
    takes quadratic time to read an integer, and cannot write one of more than 4,300 digits.
    """

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > _MAX_NUMBER:
            text = f"a number has {len(node.value)} characters; at most {_MAX_NUMBER}"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
        text = self.construct_scalar(node)
        if node.tag.endswith(":int"):
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                text = f"duplicate key '{shortened(key.value, 80)}'"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            seen.add(getattr(key, "value", None) if isinstance(key, yaml.ScalarNode) else id(key))
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"^(?:[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)"
        r"|\.(nan|NaN|NAN))$"
    ),
}
"""What is a number in YAML 1.2 (https://yaml.org/spec/1.2.2/#1032-tag-resolution)."""
FIRST_OF_NUMBERS = list("-+.0123456789")

_OLD_TAGS = (*NUMBERS, "tag:yaml.org,2002:timestamp")
_UniqueKeys.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] not in _OLD_TAGS]
    for first, resolvers in _UniqueKeys.yaml_implicit_resolvers.items()
}
for _tag, _pattern in NUMBERS.items():
    _UniqueKeys.add_implicit_resolver(_tag, _pattern, FIRST_OF_NUMBERS)
    _UniqueKeys.add_constructor(_tag, _UniqueKeys.construct_number)


def read_record(
    record: type[T], value: Any, source: str, version: int = 1, older: int | None = None
) -> T:
    """Build the record of a file from its JSON object.

    Args:
        record: what to build, a pydantic model or a dataclass.
        value: the object; its `version` is the schema's.
        source: how error messages call it.
        version: the version that `value` must have.
        older: a version that lacks optional keys alone, or has some that are not read. It is read
            as `version`.

    Raises:
        UsageError: one line that names `source`, the place, what was got and what is wanted.
    """
    if not isinstance(value, dict):
        raise UsageError(f"{source} must hold a JSON object, got {type(value).__name__}")
    got = value.get("version")
    known = (version,) if older is None else (older, version)
    if got not in known or isinstance(got, bool):
        shown = shortened(repr(got), 80)
        accepted = " or ".join(map(str, known))
        raise UsageError(f"{source}: version {shown}; this megatron-snip reads version {accepted}")
    return checked(record, {**value, "version": version}, source)


def checked(record: type[T], value: Any, source: str) -> T:
    """Build a record from plain values.

    Raises:
        UsageError: one line that names `source`, the place, what was got and what is wanted.
    """
    try:
        return TypeAdapter(record).validate_python(value)
    except ValidationError as error:
        problem = first_problem(error, record)
        raise UsageError(f"{source}: {problem}{_linear_of(error, value)}") from None
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


class OwnSchema:
    """A field whose record has a schema of its own: its `from_dict` and `to_dict` count."""

    def __get_pydantic_core_schema__(self, record: Any, handler: object) -> core_schema.CoreSchema:
        def read(value: Any) -> Any:
            return value if isinstance(value, record) else record.from_dict(value)

        to_dict = core_schema.plain_serializer_function_ser_schema(record.to_dict)
        return core_schema.no_info_plain_validator_function(read, serialization=to_dict)


class PackedSchema:
    """As `OwnSchema`, for a large record in a small file: `packed` of what `to_dict` returned.

    What is not packed is read as well.
    """

    def __get_pydantic_core_schema__(self, record: Any, handler: object) -> core_schema.CoreSchema:
        def read(value: Any) -> Any:
            if isinstance(value, record):
                return value
            return record.from_dict(unpacked(value) if isinstance(value, str) else value)

        def write(value: Any) -> str:
            return packed(value.to_dict())

        text = core_schema.plain_serializer_function_ser_schema(write)
        return core_schema.no_info_plain_validator_function(read, serialization=text)


def packed(value: Any) -> str:
    """Return plain values as JSON, compressed by zlib, in base64."""
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), level=1)).decode()


def unpacked(text: str) -> Any:
    """Return what `packed` was given.

    Raises:
        UsageError: one line, if the text is not what `packed` returns or is above `MAX_BYTES`.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
        if not unpacker.eof:
            raise ValueError("it is cut, or too large")
        return from_json(data)
    except (ValueError, zlib.error) as error:
        raise UsageError(f"not JSON in zlib in base64: {one_line(error)}") from None


def _linear_of(error: ValidationError, value: Any) -> str:
    """Return the name of the linear where the first error is, if it has one."""
    place = error.errors()[0]["loc"]
    if len(place) > 2 and place[0] == "linears" and isinstance(place[1], int):
        name = value["linears"][place[1]].get("name")
        return f" (linear {name!r})" if isinstance(name, str) else ""
    return ""


def _names_at(record: Any, place: Sequence[str | int]) -> Iterable[str]:
    """Return the names of the fields where a key of a record is, by the places above the key."""
    for part in place[:-1]:
        fields = getattr(record, "model_fields", {})
        if part not in fields:  # an item of a list, or a key of a mapping
            continue
        record = fields[part].annotation
        while get_args(record):  # Annotated, `| None`, a tuple's items, a mapping's values
            record = next(
                (each for each in get_args(record) if hasattr(each, "model_fields")),
                get_args(record)[-1 if get_origin(record) is dict else 0],
            )
    return getattr(record, "model_fields", ())


def first_problem(error: ValidationError, record: Any = None) -> UsageError:
    """Return the first problem that pydantic found, with its field.

    Args:
        error: what pydantic raised.
        record: the model, whose fields are proposed in place of an unknown key.
    """
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    kind = first["type"]
    value = first["input"]
    if kind == "extra_forbidden":
        hint = did_you_mean(str(first["loc"][-1]), _names_at(record, first["loc"]))
        return UsageError(f"unknown key {shortened(repr(place), 120)}{hint}")
    text = str(first["msg"]).replace("Input should be", "must be").partition(", unable to ")[0]
    text = re.sub(r" or (an )?instance of \w+", "", text)  # a class of ours
    text = re.sub(r"\d{16,}", lambda number: f"{float(number[0]):g}", text)
    if kind not in ("missing", "value_error"):
        text += f", got {shortened(repr(value), 120)}"
    if kind == "literal_error":
        text += did_you_mean(str(value), re.findall(r"'(.*?)'", first["ctx"]["expected"]))
    return UsageError(shortened(" ".join(text.split()), 500), field=place or None)


def without_nan(value: Any) -> Any:
    """Return plain values with None in place of floats that are not finite, which JSON lacks."""
    return to_jsonable_python(value, inf_nan_mode="null")


def write_atomic(path: Path, text: str) -> None:
    """Write a text file that is never seen incomplete.

    A device or a pipe is written to; replacing it would break its other users. A symbolic link is
    replaced, and its target stays as it is.

    Raises:
        OSError: if the directory is missing or not writable, or if a pipe has no reader; no file
            is left behind.
    """
    in_dev = path.absolute().parts[:2] == ("/", "dev")  # /dev/stdout is a link
    if path.exists() and (in_dev or not (path.is_file() or path.is_symlink())):
        with open(path, "w", encoding="utf-8", opener=_open_without_waiting) as stream:
            os.set_blocking(stream.fileno(), True)  # a reader may be slow
            stream.write(text)
        return
    # Not mkstemp, whose files are private: their mode could only be set with the umask, which a
    # process with threads must not change in order to read it.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        # An error of a write names no file, and one of the rename the temporary file.
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    with contextlib.suppress(OSError):  # makes the rename durable where directories can be opened
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe without its other end, or a file of /proc, is an error where it waits."""
    return os.open(path, flags | os.O_NONBLOCK)


def _open_plain(path: str, flags: int) -> int:
    return _open_without_waiting(path, flags | os.O_NOFOLLOW)
