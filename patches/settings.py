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
from megatron_snip.options import Option
from megatron_snip.patches.arguments import DEST, PREFIX, add_snip_arguments

_CONFIG = f"{DEST}config"
_ABOUT = (
    (r"\bpolicy '", "policy"),
    (r"\bplan file\b", "plan_file"),
    (r"\bno plan satisfies: .*\btarget [01]", "efficiency_target"),
    (r"\btarget \S+ in stage\b", "pipeline_balance"),
    (r"\bpin \S+=", "pins"),
)
"""Words of the planner's messages, and the setting that each is about."""

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

    @property
    def forgotten(self) -> list[str]:
        """Flags that were given without --snip, and without its opposite."""
        if self.enabled or f"{DEST}enabled" in self.given:
            return []
        return [flag_name(PREFIX, name.removeprefix(DEST)) for name in self.given]


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
        config = SnipConfig(**values)
    except ValidationError as error:
        text = explain(error, f"--{PREFIX}").replace("--snip-enabled", "--snip")
        raise UsageError(text) from None
    except UsageError as error:
        text = _FIELD.sub(lambda match: flag_name(PREFIX, match[1]), str(error))
        raise UsageError(text) from None
    if config.enabled:
        _check_policy(config.policy)
    return config


def idle_settings(config: SnipConfig) -> list[str]:
    """Return what was asked for and has no effect, a line each."""
    from megatron_snip.planning.policies import get_policy

    if get_policy(config.policy).heeds_target:
        return []
    idle = [name for name in ("efficiency_target", "pipeline_balance") if _asked(config, name)]
    if not idle:
        return []
    flags = ", ".join(flag_name(PREFIX, name) for name in idle)
    return [f"--snip-policy {config.policy} heeds no target; without effect: {flags}"]


def naming_flags(message: str) -> str:
    """Put the flags that a message is about before it, unless it names some."""
    if f"--{PREFIX}" in message:
        return message
    fields = [field for pattern, field in _ABOUT if re.search(pattern, message)]
    flags = ", ".join(flag_name(PREFIX, field) for field in fields)
    return f"{flags}: {message}" if flags else message


def _check_policy(policy: str) -> None:
    """Refuse a name that no policy has, or an option that no linear has.

    Raises:
        UsageError: naming the flag.
    """
    from megatron_snip.planning.policies import UNIFORM, get_policy  # the solver takes a second

    try:
        get_policy(policy)
        if policy.startswith(UNIFORM):
            Option.parse(policy.removeprefix(UNIFORM))
    except UsageError as error:
        raise UsageError(f"--snip-policy: {error}") from None


def _asked(config: SnipConfig, name: str) -> bool:
    """Whether a setting was given, and as something else than its default."""
    default = SnipConfig.model_fields[name].default
    return name in config.model_fields_set and getattr(config, name) != default


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
