"""What a job runs its linears in before SNIP sets anything, in models that open no FP4 context."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_snip.linears.model import PlannedModel
from megatron_snip.linears.te.job import job_recipe
from megatron_snip.options import Option
from megatron_snip.topology import Topology
from tests.models import SEQUENCE, build, losses, resolved

FP4 = {"fp4": "e2m1"}
MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}


def build_hybrid(pattern: str = "*-*-", **changes: Any) -> torch.nn.Module:
    """Two attention layers and two MLPs in a stack of Mamba, MLP and attention layers."""
    values = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    shape = {
        "vocab_size": 32,
        "max_sequence_length": SEQUENCE,
        "position_embedding_type": "rope",
    }
    try:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        config = TransformerConfig(**values, **changes)
        model = HybridModel(config, hybrid_stack_spec, hybrid_layer_pattern=pattern, **shape)
    except ImportError:  # Megatron-Core 0.16
        from megatron.core.models.mamba import MambaModel
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

        config = TransformerConfig(**values, **changes, is_hybrid_model=True)
        model = MambaModel(config, mamba_stack_spec, hybrid_override_pattern=pattern, **shape)
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("precision", [FP4, MXFP8], ids=["nvfp4", "mxfp8"])
@pytest.mark.parametrize("kind", ["multi-token prediction", "hybrid"])
def test_a_linear_runs_what_its_job_option_says(kind: str, precision: dict[str, Any]) -> None:
    model = build_hybrid(**precision) if kind == "hybrid" else build(mtp_num_layers=1, **precision)
    under = PlannedModel([model], Topology(), seed=7)
    under.install()
    losses(model)
    for linear in under.linears:
        recipe = linear.recipe
        assert set(linear.module.seen) == {(recipe, recipe, recipe)}, linear.name


@pytest.mark.parametrize("precision", [FP4, MXFP8], ids=["nvfp4", "mxfp8"])
def test_snip_changes_nothing_in_a_hybrid_stack_of_multi_token_prediction(
    precision: dict[str, Any],
) -> None:
    """Megatron counts its layers among the first and last ones in FP4, and not in FP8."""
    pytest.importorskip("megatron.core.models.hybrid.hybrid_model")
    ends = {
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    }

    def ran(installs: bool) -> dict[str, set[Any]]:
        model = build_hybrid("*-*-/*-", mtp_num_layers=1, **ends, **precision)
        if installs:
            PlannedModel([model], Topology(), seed=7).install()
        losses(model)
        return {name: set(m.seen) for name, m in model.named_modules() if hasattr(m, "seen")}

    assert ran(installs=True) == ran(installs=False)


def test_layers_whose_forward_and_backward_overlap_run_fp4_where_megatron_opens_it() -> None:
    """Megatron-Core 0.16 opens only FP8 around them."""
    from megatron.core.models.common import model_chunk_schedule_plan

    model = build(**FP4)
    module = model.decoder.layers[0].mlp.linear_fc1
    assert job_recipe(module, "decoder.layers.0.mlp.linear_fc1").fprop == "nvfp4"
    module.config.overlap_moe_expert_parallel_comm = True
    opens_fp8_alone = hasattr(model_chunk_schedule_plan, "get_fp8_context")
    wanted = "bf16" if opens_fp8_alone else "nvfp4"
    assert job_recipe(module, "decoder.layers.0.mlp.linear_fc1").fprop == wanted


def test_a_custom_recipe_of_the_job_counts_as_fp8_in_plans_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    factory = "megatron_snip.linears.te.quantizers.nvfp4_mxfp8_bf16"
    model = build(fp8="e4m3", fp8_recipe="custom", fp8_quantizer_factory=factory)
    with caplog.at_level("INFO", "megatron_snip"):
        resolved(model)
    custom = "snip: the job's own recipe (--fp8-format e4m3 --fp8-recipe custom) counts as fp8: "
    assert custom in caplog.text
    under = PlannedModel([model], Topology(), seed=7)
    under.install()
    for option, ran in (("mxfp8", ("mxfp8",) * 3), ("fp8", ("nvfp4", "mxfp8", "bf16"))):
        under.apply({linear.name: Option.uniform(option) for linear in under.linears})
        losses(model)
        assert {linear.module.seen[-1] for linear in under.linears} == {ran}
