"""Megatron-Bridge's settings, by the names that Megatron-LM's parser gives them.

Both loops train the same Megatron-Core, and most of Bridge's settings are fields of Core's own
configs, whose names are those of Megatron-LM's flags. Few are not; `_RENAMED` has them.
"""

from argparse import Namespace
from typing import Any

SECTIONS = (
    *("train", "validation", "dataset", "tokenizer", "logger", "dist", "checkpoint", "scheduler"),
    *("ddp", "optimizer", "rng", "model"),
)
"""Of a ConfigContainer; a later one wins where two have a field of the same name."""

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
    for name in SECTIONS:
        section = getattr(cfg, name, None)
        # A ModelConfig of 0.6 holds Core's config; a provider is one.
        for holder in (getattr(section, "transformer", None), section):
            fields = {} if holder is None else vars(holder)
            found |= {k: v for k, v in fields.items() if not k.startswith("_")}
    found |= {new: found[old] for old, new in _RENAMED.items() if old in found}
    found |= {"peft": getattr(cfg, "peft", None), "iteration": iteration}
    found["tensor_inspect"] = getattr(getattr(cfg, "tensor_inspect", None), "enabled", False)
    found["variable_seq_lengths"] = _lengths_vary(cfg.dataset)
    return Namespace(**found)


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
