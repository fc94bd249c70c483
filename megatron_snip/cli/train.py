"""`megatron-snip train`: train a Llama-style GPT, on ranks of its own or as one of torchrun's."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron_snip.cli.common import integer
from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.flags import add_flags, given_values
from megatron_snip.trainer.checks import check_run
from megatron_snip.trainer.config import TrainConfig, TrainFields, load_train_config
from megatron_snip.trainer.launch import launch, under_torchrun
from megatron_snip.trainer.megatron_arguments import (
    add_megatron_arguments,
    as_megatron_means,
    megatron_defaults,
)
from megatron_snip.trainer.worker import train_as_rank

EXAMPLES = """\
Settings come from a YAML file (--config), from flags, or both; flags win. Their names are
Megatron's own; SNIP's begin with --snip-. In YAML they are keys, SNIP's below `snip:`.
@FILE stands for the flags in a file, such as one that a Megatron-LM script is given.

The command starts the ranks itself, as many as the parallel sizes need; --nproc-per-node starts
more, which train data-parallel. Under torchrun it is one of torchrun's ranks.

examples:
  megatron-snip train --config configs/demo.yaml
  megatron-snip train --config configs/demo.yaml --no-snip --run-dir runs/bf16
  megatron-snip train --config configs/demo.yaml --pipeline-model-parallel-size 2
  megatron-snip train --config configs/demo.yaml --snip-efficiency-target 0.9
  megatron-snip train @configs/models/tinyllama-1.1b.args --snip-config configs/snip/balanced.yaml
  torchrun --nproc-per-node 8 -m megatron_snip train --config configs/demo.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: the launcher's, the trainer's by group, SNIP's by group."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [--config FILE] [--nproc-per-node N] [--SETTING VALUE ...]"
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("Where settings come from, and how many ranks")
    group.add_argument("--config", metavar="FILE", type=Path, help="YAML file with settings")
    group.add_argument(
        "--snip-config",
        dest="snip_config",
        metavar="FILE",
        type=Path,
        help="YAML file with SNIP's settings alone, by name (efficiency_target: 0.75)",
    )
    group.add_argument(
        "--nproc-per-node",
        metavar="N",
        help="ranks to start on this machine [default: as many as one copy of the model needs]",
    )
    add_flags(parser, TrainFields)
    add_megatron_arguments(parser)
    add_flags(parser, SnipConfig, prefix="snip-", dest="snip_")


def run(args: argparse.Namespace) -> int:
    """Check everything, then train; return the exit status.

    Raises:
        UsageError: for bad input; nothing has been written then.
    """
    config = read_settings(args)
    if under_torchrun():
        return _run_as_rank(config)
    ranks = config.model_parallel_size
    if args.nproc_per_node is not None:
        ranks = integer("--nproc-per-node", args.nproc_per_node)
    check_run(config, ranks)
    return launch(config, ranks)


def read_settings(args: argparse.Namespace) -> TrainConfig:
    """Return the settings that a command line asks for.

    Raises:
        UsageError: one line naming the file, field or flag and what is wrong.
    """
    return load_train_config(
        args.config,
        as_megatron_means(args, given_values(args, TrainFields)),
        given_values(args, SnipConfig, "snip_"),
        defaults=megatron_defaults(args),
        snip_file=args.snip_config,
    )


def _run_as_rank(config: TrainConfig) -> int:
    try:
        train_as_rank(config)
    except UsageError:
        if os.environ["RANK"] == "0":
            raise
        return 2  # every rank refuses the same input; one of them says so
    return 0
