"""`megatron-snip train`: train a Llama-style GPT, as launcher or as one of torchrun's ranks."""

import argparse
import logging
import os
from pathlib import Path

from megatron_snip.cli.common import integer
from megatron_snip.config import SnipConfig
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.files import read_yaml
from megatron_snip.flags import add_flags, flag_name, given_values
from megatron_snip.log import warn_once_per_job
from megatron_snip.trainer.config import TrainConfig, TrainFields, check_ranks, load_train_config
from megatron_snip.trainer.launch import default_num_ranks, is_rank, launch, train_as_rank

logger = logging.getLogger(__name__)

EPILOG = """\
Settings come from a YAML file (--config), from flags, or both; flags override the file. The names
are Megatron's; SNIP's flags begin with --snip-. In YAML SNIP's settings are below `snip:`.
Under torchrun the process is one of the ranks; else the command starts them.

examples:
  megatron-snip train --config configs/demo.yaml --snip-efficiency-target 0.9
  megatron-snip train --config configs/demo.yaml --no-snip --run-dir runs/bf16
  megatron-snip train --num-layers 8 --snip --snip-config configs/snip/balanced.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the launcher, the trainer and SNIP, by group."""
    parser.usage = "%(prog)s [--config FILE] [--nproc-per-node N] [--SETTING VALUE ...]"
    parser.epilog = EPILOG
    group = parser.add_argument_group("Settings files and ranks")
    group.add_argument("--config", metavar="FILE", type=Path, help="YAML file with settings")
    text = "YAML file with SNIP's settings only (efficiency_target: 0.75)"
    group.add_argument("--snip-config", metavar="FILE", type=Path, help=text)
    text = (
        "ranks to start on this machine "
        "[default: on a CPU the ranks of one model replica, else one for each GPU]"
    )
    group.add_argument("--nproc-per-node", metavar="N", type=integer, help=text)
    add_flags(parser, TrainFields)
    add_flags(parser, SnipConfig, "snip-")


def run(args: argparse.Namespace) -> int:
    """Train; return the exit status. The ranks check the rest of the input.

    Raises:
        UsageError: for bad input; nothing is written then.
        UnsupportedError: if SNIP cannot run with the settings.
    """
    config = read_settings(args)
    ignored = ignored_flags(args, config)
    if ignored:
        flags = ", ".join(ignored)
        warn_once_per_job(logger, f"without --snip these flags have no effect: {flags}")
    if not is_rank():
        ranks = args.nproc_per_node or default_num_ranks(config)
        check_ranks(config, ranks)
        return launch(config, ranks)
    try:
        train_as_rank(config)
    except (UsageError, UnsupportedError):
        if os.environ["RANK"] == "0":
            raise
        return 2  # every rank refuses the same input; rank 0 prints it
    return 0  # also after a signal, see `trainer.launch`


def read_settings(args: argparse.Namespace) -> TrainConfig:
    """Return the settings of a command line.

    Raises:
        UsageError: one line naming the file, field or flag and what is wrong.
    """
    values = given_values(args, TrainFields)
    snip = given_values(args, SnipConfig, "snip-")
    try:
        return load_train_config(args.config, values, snip, args.snip_config)
    except UsageError as error:
        if args.config is None:
            raise
        keys = read_yaml(args.config).keys() - TrainConfig.model_fields.keys()
        if not keys & SnipConfig.model_fields.keys():
            raise
        text = f"'{args.config}' has settings of SNIP's; name it with --snip-config"
        raise UsageError(f"{text}, or put them below 'snip:' ({error})") from None


def ignored_flags(args: argparse.Namespace, config: TrainConfig) -> list[str]:
    """Return the flags of SNIP's settings that have no effect, because nobody turned SNIP on.

    Settings of a file count, unless it turns SNIP off itself (`enabled: false`).
    """
    given = set(given_values(args, SnipConfig, "snip-"))
    if config.snip.enabled or "enabled" in given:
        return []
    if "enabled" not in config.snip.model_fields_set:
        given |= config.snip.model_fields_set - {"formats"}  # `make_train_config` sets it
    return [flag_name("snip-", name) for name in SnipConfig.model_fields if name in given]
