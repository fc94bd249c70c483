"""Megatron's command lines as settings of this trainer. Imports no torch.

The trainer's flags have Megatron's names, but some other defaults, and its model is always a Llama.
A file of Megatron arguments (`@FILE`) must have Megatron's meaning. With one on the command line

    a missing flag                       takes Megatron's default            MEGATRON_DEFAULTS
    a property that the trainer fixes    must be given with that value       FIXED
    a flag without effect here           is accepted with a warning          WITHOUT_EFFECT
    any other flag                       is an error, as always
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

from megatron_snip.argument_file import PREFIX, line_words
from megatron_snip.errors import UsageError
from megatron_snip.flags import flag_name
from megatron_snip.log import warn_once

logger = logging.getLogger(__name__)

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

NEEDED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
    "train_iters",
    "lr",
)
"""Fields without a default in Megatron."""

FIXED: dict[str, str | bool] = {
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
"""Properties of this trainer's models; Megatron's defaults differ."""

_VALUES_WITHOUT_EFFECT = (
    *("transformer_impl", "attention_backend", "tokenizer_model"),
    *("num_workers", "log_interval", "ckpt_format"),
)
_SWITCHES_WITHOUT_EFFECT = (
    *("use_mcore_models", "use_cpu_initialization", "log_throughput", "exit_signal_handler"),
    *("no_gradient_accumulation_fusion", "no_masked_softmax_fusion", "no_bias_swiglu_fusion"),
    *("no_bias_dropout_fusion", "no_rope_fusion", "no_persist_layer_norm"),
    *("moe_grouped_gemm", "moe_permute_fusion"),
)
WITHOUT_EFFECT = (*_VALUES_WITHOUT_EFFECT, *_SWITCHES_WITHOUT_EFFECT)
"""Megatron's flags that this trainer accepts and ignores."""

NULL_TOKENIZER = "NullTokenizer"
"""For data that are token ids; Megatron then adds the end of document to --vocab-size."""

_DEST = "megatron_"
_IMPLIED = "--megatron-defaults"


def add_megatron_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `@FILE` and those of Megatron's flags that are not settings here."""
    parser.fromfile_prefix_chars = PREFIX
    setattr(parser, "convert_arg_line_to_args", _file_arguments)  # noqa: B010  mypy: not assignable
    group = parser.add_argument_group(
        "Megatron's command lines", f"{PREFIX}FILE stands for the arguments in a file."
    )
    absent = argparse.SUPPRESS
    group.add_argument(
        _IMPLIED,
        action="store_true",
        help=f"use Megatron's defaults instead of this trainer's ({PREFIX}FILE implies it)",
    )
    for name, value in FIXED.items():
        text = "always on" if value is True else f"always {value}"
        how: dict[str, Any] = {"action": "store_true"} if value is True else {"metavar": "NAME"}
        group.add_argument(flag_name("", name), dest=_DEST + name, default=absent, help=text, **how)
    group.add_argument(
        "--group-query-attention",
        dest=f"{_DEST}group_query_attention",
        action="store_true",
        default=absent,
        help="use num_query_groups (Megatron ignores it otherwise)",
    )
    group.add_argument(
        "--tokenizer-type",
        dest=f"{_DEST}tokenizer_type",
        metavar="NAME",
        default=absent,
        help=f"{NULL_TOKENIZER}: vocab_size excludes the end of document",
    )
    for name in WITHOUT_EFFECT:
        how = {"metavar": "X"} if name in _VALUES_WITHOUT_EFFECT else {"action": "store_true"}
        group.add_argument(
            flag_name("", name), dest=_DEST + name, default=absent, help=argparse.SUPPRESS, **how
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
        UsageError: if Megatron would build another model or not start.
    """
    extra = {
        name.removeprefix(_DEST): value
        for name, value in vars(args).items()
        if name.startswith(_DEST) and name != "megatron_defaults"
    }
    _check_fixed(extra, args.megatron_defaults)
    unused = [flag_name("", name) for name in extra if name in WITHOUT_EFFECT]
    if unused:
        warn_once(logger, f"without effect in this trainer: {', '.join(unused)}")
    values = dict(given)
    size = str(values.get("vocab_size"))
    if extra.get("tokenizer_type") == NULL_TOKENIZER and size.isdecimal() and len(size) < 18:
        values["vocab_size"] = int(size) + 1
    if args.megatron_defaults:
        missing = [flag_name("", name) for name in NEEDED if name not in values]
        if missing:
            raise UsageError(f"Megatron has no default for {', '.join(missing)}; give a value")
        _check_query_groups(values, "group_query_attention" in extra)
    return values


def _file_arguments(line: str) -> list[str]:
    arguments = line_words(line)
    return [_IMPLIED, *arguments] if arguments else []


def _check_fixed(given: dict[str, Any], as_megatron: bool) -> None:
    for name, wanted in FIXED.items():
        flag = flag_name("", name) + ("" if wanted is True else f" {wanted}")
        if name not in given:
            if as_megatron:
                raise UsageError(
                    f"without {flag} Megatron builds a model other than this trainer's"
                )
        elif given[name] != wanted:
            raise UsageError(f"{flag_name('', name)}: got '{given[name]}'; this trainer has {flag}")


def _check_query_groups(values: dict[str, Any], used: bool) -> None:
    if used and "num_query_groups" not in values:
        raise UsageError("--group-query-attention needs --num-query-groups")
    if not used and "num_query_groups" in values:
        raise UsageError("Megatron ignores --num-query-groups without --group-query-attention")
