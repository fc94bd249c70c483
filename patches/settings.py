"""From a script's flags to SnipConfig: YAML first, flags over it, Megatron's own wishes as pins.

The flags are read twice: from the command line when the seams are installed (to know whether SNIP
is wanted at all), and from Megatron's namespace when the model is built, which is where they are
checked. Messages name the flag.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from megatron_snip.config import SnipConfig, explain, make_config, read_yaml
from megatron_snip.errors import SnipError, UsageError
from megatron_snip.flags import flag_name, given_values
from megatron_snip.patches.arguments import DEST, PREFIX, add_snip_arguments

_CONFIG = f"{DEST}config"
_FIELD = re.compile(rf"^({'|'.join(SnipConfig.model_fields)})\b")


@dataclass(frozen=True)
class Wish:
    """What a command line asks for, before Megatron has parsed it.

    Attributes:
        enabled: SNIP is wanted (or its flags are wrong, which is to be said later).
        strict_version: only tested releases of megatron-core.
        given: the flags, by namespace attribute.
    """

    enabled: bool
    strict_version: bool
    given: dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def read_wish(words: Sequence[str]) -> Wish:
    """Read a script's command line for SNIP's flags alone; never fails.

    Args:
        words: the command line without the script's name.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_snip_arguments(parser)
    try:
        given = vars(parser.parse_known_args(list(words))[0])
        enabled = bool(_values(given).get("enabled", False))
    except SnipError:
        # Megatron's parser, or `snip_config` later, will say what is wrong.
        return Wish(True, False, {})
    return Wish(enabled, bool(given.get(f"{DEST}strict_version", False)), given)


def snip_config(args: argparse.Namespace, given: Mapping[str, Any]) -> SnipConfig:
    """Build and check the settings.

    Args:
        args: Megatron's namespace.
        given: flags of the command line, for namespaces that were made without them
            (`--yaml-cfg`).

    Raises:
        UsageError: one line that names the flag, what was got and what is wanted.
    """
    flags = {k: v for k, v in vars(args).items() if k.startswith(DEST)}
    values = _values({**given, **flags})
    pins = _bf16_layers(args)
    if pins and values.get("enabled"):
        values["pins"] = (*pins, *_as_tuple(values.get("pins", ())))
    try:
        return SnipConfig(**values)
    except ValidationError as error:
        text = explain(error, f"--{PREFIX}").replace("--snip-enabled", "--snip")
        raise UsageError(text) from None
    except UsageError as error:
        text = _FIELD.sub(lambda match: flag_name(PREFIX, match[1]), str(error))
        raise UsageError(text) from None


def _values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by name: the YAML file's, then the flags'.

    Raises:
        UsageError: if the file cannot be read or does not hold settings.
    """
    values: dict[str, Any] = {}
    if flags.get(_CONFIG) is not None:
        path = Path(flags[_CONFIG])
        try:
            values = read_yaml(path)
            make_config(values)
        except UsageError as error:
            raise UsageError(f"--{PREFIX}config {path}: {error}") from None
    return values | given_values(argparse.Namespace(**flags), SnipConfig, DEST)


def _as_tuple(pins: Any) -> tuple[str, ...]:
    if isinstance(pins, str):
        return tuple(part.strip() for part in pins.split(",") if part.strip())
    return tuple(pins)


def _bf16_layers(args: argparse.Namespace) -> tuple[str, ...]:
    """Pins for `--first-last-layers-bf16`: whole layers that stay in BF16."""
    if not getattr(args, "first_last_layers_bf16", False):
        return ()
    layers = int(args.num_layers)
    first = int(args.num_layers_at_start_in_bf16)
    last = int(args.num_layers_at_end_in_bf16)
    kept = [*range(first), *range(max(first, layers - last), layers)]
    return tuple(f"decoder.layers.{layer}.*=bf16" for layer in kept)
