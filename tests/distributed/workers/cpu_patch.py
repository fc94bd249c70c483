"""What test_cpu.py runs on ranks."""

import math
from typing import Any

import megatron.core.models.gpt  # noqa: F401  # imported once, before the ranks are forked
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_snip.patches import cpu


class Stage(torch.nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.input: Any = None

    def set_input_tensor(self, tensors: Any) -> None:
        self.input = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.linear(tokens if self.input is None else self.input).tanh()


def interleaved_pipeline(deallocate: bool) -> dict[str, Any]:
    """Losses and gradients of one iteration; a stage's freed output is overwritten at once."""
    cpu.install()
    original = schedules.deallocate_output_tensor

    def overwrite(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
        if out is not None and deallocate_pipeline_outputs:
            out.data.fill_(math.nan)
        original(out, deallocate_pipeline_outputs)

    schedules.deallocate_output_tensor = overwrite
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    config = TransformerConfig(
        num_layers=4,
        hidden_size=512,
        num_attention_heads=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=deallocate,
    )
    torch.manual_seed(dist.get_rank())
    model = [Stage(config) for _ in range(2)]

    def forward_step(data: Any, stage: Stage) -> Any:
        return stage(next(data)), lambda out: ((loss := out.square().mean()), {"loss": float(loss)})

    microbatches = [torch.full((256, 4, 512), 0.1 * n) for n in range(1, 9)]
    losses = schedules.forward_backward_pipelining_with_interleaving(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches), iter(microbatches)],
        model=model,
        num_microbatches=8,
        seq_length=256,
        micro_batch_size=4,
        forward_only=False,
    )
    gradients = [float(p.grad.double().sum()) for stage in model for p in stage.parameters()]
    return {"losses": [item["loss"] for item in losses], "gradients": gradients}
