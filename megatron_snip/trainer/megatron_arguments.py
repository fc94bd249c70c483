"""Megatron's command lines as this trainer reads them. Needs no torch.

The trainer's flags have Megatron's names, but not all of Megatron's defaults, and it knows one
kind of model: a Llama, dense or with experts. A file of Megatron arguments (`@FILE`) must mean here
what it means to Megatron, so with one on the command line

    what is not given            takes Megatron's default                MEGATRON_DEFAULTS
    what this trainer fixes      must be given, and as it is here        FIXED
    what changes nothing here    is taken, and said                      WITHOUT_EFFECT
    anything else                is refused, as every unknown flag is
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
"""Fields whose default is another one in Megatron; where it has none, the flag is needed."""

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
"""Fields that have no default in Megatron."""

FIXED: dict[str, str | bool] = {
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
"""What this trainer's models are; Megatron's defaults are others."""

WITHOUT_EFFECT: dict[str, int] = {
    "transformer_impl": 1,
    "attention_backend": 1,
    "tokenizer_model": 1,
    "num_workers": 1,
    "log_interval": 1,
    "ckpt_format": 1,
    "use_mcore_models": 0,
    "use_cpu_initialization": 0,
    "log_throughput": 0,
    "exit_signal_handler": 0,
    "no_gradient_accumulation_fusion": 0,
    "no_masked_softmax_fusion": 0,
    "no_bias_swiglu_fusion": 0,
    "no_bias_dropout_fusion": 0,
    "no_rope_fusion": 0,
    "no_persist_layer_norm": 0,
    "moe_grouped_gemm": 0,
    "moe_permute_fusion": 0,
}
"""Flags of Megatron's that change nothing in this trainer, and how many words follow each."""

NULL_TOKENIZER = "NullTokenizer"
"""For data that are token ids; Megatron then adds an id to --vocab-size, the end of document."""

_DEST = "megatron_"
_IMPLIED = "--megatron-defaults"


def add_megatron_arguments(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take `@FILE`, and the flags of Megatron's that are no settings here."""
    parser.fromfile_prefix_chars = PREFIX
    setattr(parser, "convert_arg_line_to_args", _file_words)  # noqa: B010  mypy: not assignable
    group = parser.add_argument_group(
        "Megatron's command lines", f"A file of Megatron arguments is given as {PREFIX}FILE."
    )
    absent = argparse.SUPPRESS
    group.add_argument(
        _IMPLIED,
        action="store_true",
        help=f"what is not given takes Megatron's default, not this trainer's ({PREFIX}FILE "
        "implies it)",
    )
    for name, value in FIXED.items():
        text = f"{value} is what this trainer has" if value is not True else "as it is here anyway"
        how: dict[str, Any] = {"action": "store_true"} if value is True else {"metavar": "NAME"}
        group.add_argument(flag_name("", name), dest=_DEST + name, default=absent, help=text, **how)
    group.add_argument(
        "--group-query-attention",
        dest=f"{_DEST}group_query_attention",
        action="store_true",
        default=absent,
        help="heed num_query_groups, which Megatron does only so",
    )
    group.add_argument(
        "--tokenizer-type",
        dest=f"{_DEST}tokenizer_type",
        metavar="NAME",
        default=absent,
        help=f"{NULL_TOKENIZER}: vocab_size is without the end of document",
    )
    for name, words in WITHOUT_EFFECT.items():
        how = {"metavar": "X"} if words else {"action": "store_true"}
        group.add_argument(
            flag_name("", name), dest=_DEST + name, default=absent, help=argparse.SUPPRESS, **how
        )


def megatron_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """Return the defaults that hold where neither YAML nor a flag says otherwise."""
    return dict(MEGATRON_DEFAULTS) if args.megatron_defaults else {}


def as_megatron_means(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """Return the given settings as Megatron understands its command line.

    Args:
        args: the parsed command line.
        given: settings on it, by field.

    Raises:
        UsageError: if Megatron would build another model, or would not start.
    """
    words = {
        name.removeprefix(_DEST): value
        for name, value in vars(args).items()
        if name.startswith(_DEST) and name != "megatron_defaults"
    }
    _check_fixed(words, args.megatron_defaults)
    unused = [flag_name("", name) for name in words if name in WITHOUT_EFFECT]
    if unused:
        warn_once(logger, f"without effect in this trainer: {', '.join(unused)}")
    values = dict(given)
    size = str(values.get("vocab_size"))
    if words.get("tokenizer_type") == NULL_TOKENIZER and size.isdecimal() and len(size) < 18:
        values["vocab_size"] = int(size) + 1
    if args.megatron_defaults:
        missing = [flag_name("", name) for name in NEEDED if name not in values]
        if missing:
            raise UsageError(f"Megatron has no default for {', '.join(missing)}; give a value")
        _check_query_groups(values, "group_query_attention" in words)
    return values


def _file_words(line: str) -> list[str]:
    words = line_words(line)
    return [_IMPLIED, *words] if words else []


def _check_fixed(words: dict[str, Any], as_megatron: bool) -> None:
    for name, wanted in FIXED.items():
        flag = flag_name("", name) + ("" if wanted is True else f" {wanted}")
        if name not in words:
            if as_megatron:
                raise UsageError(
                    f"without {flag} Megatron builds a model other than this trainer's"
                )
        elif words[name] != wanted:
            raise UsageError(f"{flag_name('', name)}: got '{words[name]}'; this trainer has {flag}")


def _check_query_groups(values: dict[str, Any], heeded: bool) -> None:
    if heeded and "num_query_groups" not in values:
        raise UsageError("--group-query-attention needs --num-query-groups")
    if not heeded and "num_query_groups" in values:
        raise UsageError("Megatron ignores --num-query-groups without --group-query-attention")
