"""SNIP's flags in Megatron's parser, and the settings that they and a YAML file make.

`read_cli_args` reads them before the script does, ends the job on a typo, and returns the other
words: a script that parses its own flags (Megatron-Bridge's do) never sees SNIP's. `snip_config`
checks them when the training loop has its settings. A flag that is not given leaves nothing in the
namespace.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from megatron_snip.config import AUTO, PATH_SETTINGS, SnipConfig, make_config
from megatron_snip.errors import (
    SnipError,
    UnsupportedError,
    UsageError,
    did_you_mean,
    naming_field,
    shown,
)
from megatron_snip.files import first_problem, read_yaml
from megatron_snip.flags import add_flags, flag_name, given_values
from megatron_snip.log import warn_once_per_job
from megatron_snip.patches.incompatible import check_flags

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX = "snip-"
DEST = "snip_"
"""Put before every flag, and before every attribute of the namespace."""

_CONFIG = f"{DEST}config"


class Refusal(SystemExit):
    """The end of a job whose line is printed: status 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def add_snip_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of SNIP's that a Megatron script takes."""
    parser.add_argument_group("SNIP: adaptive precision (megatron_snip)").add_argument(
        f"--{PREFIX}config",
        dest=_CONFIG,
        metavar="FILE",
        type=Path,
        default=argparse.SUPPRESS,
        help="YAML file with settings by name (efficiency_target: 0.75); flags win",
    )
    add_flags(parser, SnipConfig, PREFIX)


@dataclass(frozen=True)
class CommandLine:
    """A script's command line, without the script's name.

    Attributes:
        given: the settings that are given, by name: the YAML file's, then the flags'. Relative
            paths are made absolute here.
        enabled: whether they turn SNIP on.
        others: the words that are not SNIP's, in their order.
        flags: the words that are, then a flag for each path that was made absolute.
    """

    given: dict[str, Any]
    enabled: bool
    others: list[str]
    flags: list[str]


def read_cli_args(words: Sequence[str]) -> CommandLine:
    """Read SNIP's flags among a script's arguments.

    Args:
        words: the command line without the script's name.

    Raises:
        UsageError: on an unknown `--snip-*` flag, a flag without a value, or a bad YAML file.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_snip_arguments(parser)
    namespace, others = parser.parse_known_args(list(words))
    for word in others:
        if word.startswith(("--snip-", "--snip_", "--no-snip-", "--no-snip_")):
            flag = word.partition("=")[0]
            near = did_you_mean(flag, parser._option_string_actions)
            raise UsageError(f"unknown flag {flag}{near or '; --help lists the flags'}")
    given = _values(namespace)
    enabled = bool(given.get("enabled", False))
    if vars(namespace) and not enabled and f"{DEST}enabled" not in namespace:
        flags = ", ".join(flag_name(PREFIX, name.removeprefix(DEST)) for name in vars(namespace))
        warn_once_per_job(logger, f"without --snip these flags have no effect: {flags}")
    own_words = _without(words, others)
    absolute = _absolute_paths({**given, "config": getattr(namespace, _CONFIG, None)})
    for name, path in absolute.items():
        own_words += [flag_name(PREFIX, name), path]  # later words win
    given |= {name: path for name, path in absolute.items() if name != "config"}
    return CommandLine(given, enabled, others, own_words)


def _absolute_paths(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the relative paths among the settings and the YAML file's, made absolute.

    A script may change its working directory before they are used: run_recipe.py of
    Megatron-Bridge 0.6 does.

    Args:
        values: the settings, by name; `config` is the YAML file, or None.
    """
    absolute = {}
    for name in (*PATH_SETTINGS, "config"):
        path = values.get(name)
        is_path = not (name == "calibration" and path == AUTO)
        # '' is refused later, and ~ is the home directory.
        if path and is_path and not str(path).startswith(("/", "~")):
            absolute[name] = str(Path(path).absolute())
    return absolute


def _without(words: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return `words` without `others`, which are some of them in the same order."""
    left = iter(others)
    next_other = next(left, None)
    found = []
    for word in words:
        if word == next_other:
            next_other = next(left, None)
        else:
            found.append(word)
    return found


def snip_config(args: argparse.Namespace, given: Mapping[str, Any] | SnipConfig) -> SnipConfig:
    """Build the settings and check them, and Megatron's beside them.

    Args:
        args: Megatron's settings, by the names that Megatron-LM's parser gives them.
        given: settings of the command line by name, or a config that a script made.

    Raises:
        UsageError: one line; its `field` is the setting that is wrong.
        UnsupportedError: if SNIP is on and cannot run with a setting of Megatron's.
    """
    config = settings_in(args, given)
    if not config.enabled:
        return config
    config = with_flags_of_the_job(config, args)
    from megatron_snip.divergence.quality_loss import check_divergences
    from megatron_snip.planning.policies import get_policy

    with naming_field("policy"):
        get_policy(config.policy)
    check_divergences(config)
    if config.formats == (AUTO,) and hasattr(args, "transformer_impl"):
        config.model_copy(update={"formats": _auto_formats(config, args)}).check_pins()
    return config


def settings_in(args: argparse.Namespace, given: Mapping[str, Any] | SnipConfig) -> SnipConfig:
    """Build the settings; the arguments are those of `snip_config`.

    Raises:
        UsageError: one line; its `field` is the setting that is wrong.
    """
    if isinstance(given, SnipConfig):
        return given
    # A script may have given flags to Megatron-LM's parser itself, after its command line was read.
    try:
        return SnipConfig(**{**given, **_values(args)})
    except ValidationError as error:
        raise first_problem(error, SnipConfig) from None


def _auto_formats(config: SnipConfig, args: argparse.Namespace) -> tuple[str, ...]:
    """Return what `auto` may mean once the model is built; refuse now what cannot run then.

    The model decides which two of the formats it is: a stored weight may not allow the lowest.
    """
    from megatron_snip.linears.auto_formats import te_formats
    from megatron_snip.linears.te.machine import this_machine

    if config.backend == "simulate" or args.transformer_impl != "transformer_engine":
        return config.format_entries
    # Megatron's flags for a low precision of the job's own have the names of its model's settings.
    return te_formats(this_machine(with_te=True, config=args))


def with_flags_of_the_job(config: SnipConfig, args: argparse.Namespace) -> SnipConfig:
    """Return the settings under the flags of a job; log what cannot change while it runs.

    Args:
        config: the settings.
        args: Megatron's settings, by the names that Megatron-LM's parser gives them.

    Raises:
        UnsupportedError: if SNIP cannot run with one of them.
    """
    rows = check_flags(argparse.Namespace(**{**vars(args), f"{DEST}backend": config.backend}))
    only_measures = [row for row in rows if row.plans == "measures"]
    for row in rows:
        if row.plans == "restricts" and not (only_measures or config.collect_only):
            warn_once_per_job(logger, f"{row.flag}: {row.text}")
    if not only_measures or (config.collect_only and config.plan_file is None):
        return config
    for row in only_measures:
        warn_once_per_job(logger, f"{row.flag}: {row.text}; SNIP measures and makes no plans")
    return config.model_copy(update={"collect_only": True, "plan_file": None})


def exit_on_error(action: Callable[[], T], rename: Callable[[str], str] = str) -> T:
    """Run `action`; on bad input print a line for each error on each host and end the job.

    Args:
        action: what may raise.
        rename: puts the names that the training loop has for Megatron's settings into a line.

    Raises:
        Refusal: on bad input.
    """
    try:
        return action()
    except SnipError as error:
        if int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))) == 0:
            for text in _messages(error):
                print(f"megatron-snip: error: {shown(rename(text))}", file=sys.stderr, flush=True)
        raise Refusal(2) from None


def _messages(error: SnipError) -> tuple[str, ...]:
    if isinstance(error, UnsupportedError):
        return error.messages
    if isinstance(error, UsageError) and error.field is not None:
        return (f"{flag_name(PREFIX, error.field)}: {error.message}",)
    return (str(error),)


def _values(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the settings in a parser's namespace, by name: the YAML file's, then the flags'."""
    values: dict[str, Any] = {}
    path = getattr(namespace, _CONFIG, None)
    if path is not None:
        try:
            values = read_yaml(Path(path))
            config = make_config(values)
        except UsageError as error:
            raise UsageError(f"'{path}': {error}", field="config") from None
        values["enabled"] = config.enabled  # YAML may have it in quotes: "false"
    return values | given_values(namespace, SnipConfig, PREFIX)
