"""Megatron-Bridge's settings, by the names that Megatron-LM's parser gives them.

Both loops train the same Megatron-Core, and most of Bridge's settings are fields of Core's own
configs, whose names are those of Megatron-LM's flags. Few are not; `_RENAMED` has them.
"""

import logging
import re
from argparse import Namespace
from typing import Any

SECTIONS = (
    *("train", "validation", "dataset", "tokenizer", "logger", "dist", "checkpoint", "scheduler"),
    *("ddp", "optimizer", "rng", "model"),
)
"""Of a ConfigContainer; a later one wins where two have a field of the same name."""

_BRIDGES_NAMES = {
    "fp8_format": "mixed_precision.fp8",
    "fp4_format": "mixed_precision.fp4",
    "te_precision_config_file": "model.quant_recipe",
    "num_experts": "model.num_moe_experts",
    "modelopt_enabled": "model.restore_modelopt_state",
}
"""Megatron-LM's name of a setting -> Bridge's, where that is not a section and the same name."""

_FLAG = re.compile(r"--(?!snip\b|no-snip\b|cpu(?![-\w]))([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")

_section_of: dict[str, str] = {}
"""Setting -> section of the job's ConfigContainer; `settings_of` fills it."""

_RENAMED = {"num_moe_experts": "num_experts", "restore_modelopt_state": "modelopt_enabled"}
"""Bridge's name -> Megatron-LM's."""

CPU_SETTINGS: dict[str, dict[str, Any]] = {
    "dist": {"distributed_backend": "gloo"},
    # The process that would write a checkpoint selects a GPU.
    "checkpoint": {"async_save": False},
    "model": {
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
        "persist_layer_norm": False,
    },
}
"""Settings that a run without a GPU needs, by section."""


def settings_of(cfg: Any, iteration: int = 0) -> Namespace:
    """Return the settings of a job as Megatron-LM's namespace has them.

    Args:
        cfg: Bridge's ConfigContainer, after `runtime_config_update` has put the precision, the
            overlaps and the rest into its sections.
        iteration: the last iteration that the loaded checkpoint has done; 0 without one.
    """
    found: dict[str, Any] = {}
    _section_of.clear()
    for name in (*SECTIONS, "mixed_precision"):  # a precision sets the model's own fields
        _section_of.update(dict.fromkeys(_fields(getattr(cfg, name, None)), name))
    for name in SECTIONS:
        found |= _fields(getattr(cfg, name, None))
    found |= {new: found[old] for old, new in _RENAMED.items() if old in found}
    found |= {"peft": getattr(cfg, "peft", None), "iteration": iteration}
    found["tensor_inspect"] = getattr(getattr(cfg, "tensor_inspect", None), "enabled", False)
    found["variable_seq_lengths"] = _lengths_vary(cfg.dataset)
    return Namespace(**found)


def _fields(section: Any) -> dict[str, Any]:
    """Return the settings of a section; none of a precision that is only named."""
    found: dict[str, Any] = {}
    # A ModelConfig of 0.6 holds Core's config; a provider is one.
    for holder in (getattr(section, "transformer", None), section):
        fields = getattr(holder, "__dict__", {})
        found |= {k: v for k, v in fields.items() if not k.startswith("_")}
    return found


def in_bridges_names(text: str) -> str:
    """Return a message with Bridge's names of the settings in place of Megatron-LM's flags."""

    def name(match: re.Match[str]) -> str:
        setting = match[1].replace("-", "_")
        if setting in _BRIDGES_NAMES:
            return _BRIDGES_NAMES[setting]
        section = _section_of.get(setting)
        return match[0] if section is None else f"{section}.{setting}"

    return _FLAG.sub(name, text)


def log_in_bridges_names() -> None:
    """From now on the lines of this package's loggers have Bridge's names; idempotent."""
    make = logging.getLogRecordFactory()
    if getattr(make, "names_settings", False):
        return

    def record_of(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith("megatron_snip"):
            record.msg = in_bridges_names(record.getMessage())
            record.args = ()
        return record

    record_of.names_settings = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(record_of)


def _lengths_vary(dataset: Any) -> bool:
    """Return whether microbatches may differ in length.

    Samples for pretraining have one length. Others do if they are padded to it, and not packed
    when a batch is put together.
    """
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    if isinstance(dataset, GPTDatasetConfig):
        return False
    options = getattr(dataset, "dataset_kwargs", None) or {}  # of a text dataset
    is_padded = getattr(dataset, "pad_to_max_length", options.get("pad_to_max_length", False))
    return not is_padded or getattr(dataset, "enable_in_batch_packing", False)


def set_for_cpu(cfg: Any) -> None:
    """Set `CPU_SETTINGS`, where a release has the setting."""
    for name, settings in CPU_SETTINGS.items():
        section = getattr(cfg, name)
        for field, value in settings.items():
            if hasattr(section, field):
                setattr(section, field, value)
