"""Megatron's command lines as settings of this trainer. Imports no torch.

The trainer's flags have Megatron's names, but some other defaults, and its model is always a Llama.
A file of Megatron arguments (`@FILE`) must have Megatron's meaning. With one on the command line

    a missing flag                       takes Megatron's default            MEGATRON_DEFAULTS
    a property that the trainer fixes    must be given with that value       FIXED
    any other flag                       is an error, as always
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_snip.argument_file import PREFIX, line_words
from megatron_snip.errors import UsageError
from megatron_snip.flags import flag_name

MEGATRON_DEFAULTS: dict[str, Any] = {
    "untie_embeddings_and_output_weights": False,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "bf16": False,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 0,
    "weight_decay": 0.01,
    "adam_beta2": 0.999,
    "split": "969,30,1",
    "eval_iters": 100,
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "allgather",
}
"""Fields whose default differs in Megatron."""

FIXED: dict[str, str | bool] = {
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
"""Properties of this trainer's models; Megatron's defaults differ."""

NULL_TOKENIZER = "NullTokenizer"
"""For data that are token ids; Megatron then adds the end of document to --vocab-size."""

_IMPLIED = "--megatron-defaults"


def add_megatron_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `@FILE` and those of Megatron's flags that are not settings here."""
    parser.fromfile_prefix_chars = PREFIX
    setattr(parser, "convert_arg_line_to_args", _file_arguments)  # noqa: B010  mypy: not assignable
    group = parser.add_argument_group(
        "Megatron's command lines", f"{PREFIX}FILE stands for the arguments in a file."
    )
    group.add_argument(
        _IMPLIED,
        action="store_true",
        help=f"use Megatron's defaults instead of this trainer's ({PREFIX}FILE implies it)",
    )
    for name, value in FIXED.items():
        if value is True:
            group.add_argument(flag_name("", name), action="store_true", help="always on")
        else:
            group.add_argument(flag_name("", name), metavar="NAME", help=f"always {value}")
    group.add_argument(
        "--group-query-attention",
        action="store_true",
        help="use num_query_groups (Megatron ignores it otherwise)",
    )
    group.add_argument(
        "--tokenizer-type",
        metavar="NAME",
        help=f"{NULL_TOKENIZER}: vocab_size excludes the end of document",
    )


def megatron_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """Return the defaults for fields that neither YAML nor a flag sets."""
    return dict(MEGATRON_DEFAULTS) if args.megatron_defaults else {}


def as_megatron_means(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """Return the given settings with the meaning that Megatron gives them.

    Args:
        args: the parsed command line.
        given: its settings, by field.

    Raises:
        UsageError: if Megatron would build another model.
    """
    for name, wanted in FIXED.items():
        flag, value = flag_name("", name), getattr(args, name)
        full = flag if wanted is True else f"{flag} {wanted}"
        if value and value != wanted:
            raise UsageError(f"{flag}: got '{value}'; this trainer has {full}")
        if not value and args.megatron_defaults:
            raise UsageError(f"without {full} Megatron builds a model other than this trainer's")
    if args.megatron_defaults and args.group_query_attention != ("num_query_groups" in given):
        raise UsageError("Megatron needs --group-query-attention and --num-query-groups together")
    size = str(given.get("vocab_size"))
    if args.tokenizer_type == NULL_TOKENIZER and size.isdecimal() and len(size) < 18:
        return {**given, "vocab_size": int(size) + 1}
    return given


def _file_arguments(line: str) -> list[str]:
    arguments = line_words(line)
    return [_IMPLIED, *arguments] if arguments else []
