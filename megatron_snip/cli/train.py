"""`megatron-snip train`: train the demo's Llama, on ranks that torch's launcher starts."""

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_snip.cli.common import integer
from megatron_snip.config import SnipConfig
from megatron_snip.errors import UnsupportedError, UsageError
from megatron_snip.files import read_yaml
from megatron_snip.flags import add_flags, flag_name, given_values
from megatron_snip.log import warn_once_per_job
from megatron_snip.output import outlive_output
from megatron_snip.trainer.config import TrainConfig, TrainFields, check_ranks, load_train_config

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

BAD_INPUT = 2
"""Exit status of a rank that refused its input."""

_OF_A_RANK = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Variables that torchrun sets."""


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
    if not os.environ.keys() >= _OF_A_RANK:
        ignored = ignored_flags(args, config)
        if ignored:
            flags = ", ".join(ignored)
            warn_once_per_job(logger, f"without --snip these flags have no effect: {flags}")
        num_ranks = args.nproc_per_node or default_num_ranks(config)
        check_ranks(config, num_ranks)
        return launch(sys.argv[1:], num_ranks)
    try:
        train_as_rank(config)
    except (UsageError, UnsupportedError):
        if os.environ["RANK"] == "0":
            raise
        time.sleep(2)  # rank 0 prints the reason; the launcher ends all when the first rank ends
        return BAD_INPUT
    return 0


def launch(words: Sequence[str], num_ranks: int) -> int:
    """Give this command to ranks of this machine, as `torchrun --standalone` does; wait for them.

    Args:
        words: the command line of `megatron-snip`.
        num_ranks: how many to start.

    Returns:
        0; 2 if a rank refused its input; 1 if one failed; 128 + N after signal N.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="megatron-snip-") as logs, _no_logs():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id="train",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # else the ranks meet at the host's name, which may not resolve
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        rank = ("-u", "-P", "-m", "megatron_snip", *words)  # -P: no import from this directory
        try:
            elastic_launch(config, sys.executable)(*rank)
        except ChildFailedError as error:
            rank_number, failure = error.get_first_failure()  # the others are ended because of it
            if failure.exitcode < 0:
                text = f"rank {rank_number} ended by signal {-failure.exitcode}"
                print(f"megatron-snip: {text}", file=sys.stderr)
            return BAD_INPUT if failure.exitcode == BAD_INPUT else 1
        except SignalException as error:
            print(f"megatron-snip: ended by {error.sigval.name}", file=sys.stderr)
            return 128 + int(error.sigval)
    return 0


@contextmanager
def _no_logs() -> Iterator[None]:
    """Log nothing: a rank prints why it fails, and the launcher would log only that it did."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def default_num_ranks(config: TrainConfig) -> int:
    """Return the ranks of one model replica, or of as many replicas as fit on the GPUs.

    Raises:
        UsageError: if the machine has GPUs, but too few for one replica.
    """
    import torch

    replica = config.model_parallel_size
    gpus = torch.cuda.device_count()
    if 0 < gpus < replica:
        raise UsageError(
            f"the parallel sizes need {replica} GPUs, and this machine has {gpus}; reduce them, "
            "or train on the CPU (export CUDA_VISIBLE_DEVICES=)"
        )
    return max(replica, gpus // replica * replica)


def train_as_rank(config: TrainConfig) -> None:
    """Every rank of a launcher: prepare the process, and train.

    Raises:
        UsageError: if the input is bad; every rank raises.
        SnipError: if a rank cannot continue.
    """
    outlive_output()
    # Before torch is imported and CUDA starts. The user's values win; ranks share the cores.
    threads = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    # Megatron orders its communication kernels by launch order, which needs one queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Megatron and torch warn of missing Transformer Engine and of their own deprecated calls.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    for message in (
        r".torch\.distributed\..* is deprecated",
        "Please use DTensor instead",
        r"The \.grad attribute of a Tensor that is not a leaf",
    ):
        warnings.filterwarnings("ignore", message=message)
    from megatron_snip.patches import cpu

    cpu.install()  # before Megatron's import, which compiles its helpers
    from megatron_snip.trainer.session import run_rank

    run_rank(config)


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
