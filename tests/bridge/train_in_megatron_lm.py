"""A Bridge recipe's model and data, trained by Megatron-LM's loop.

    torchrun ... train_in_megatron_lm.py [Megatron-LM's flags]

TINY_RECIPE: the words of `train_recipe.py` that name the recipe and its overrides.
"""

import os
from typing import Any

from megatron.bridge.data.utils import pretrain_train_valid_test_datasets_provider
from megatron.bridge.training.config import runtime_config_update
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

from tests.bridge.train_recipe import recipe_of
from tests.bridge.weights import set_weights
from tests.megatron import pretrain_tiny


def main() -> None:
    cfg = recipe_of(os.environ["TINY_RECIPE"].split())
    runtime_config_update(cfg)
    tokenizer = build_tokenizer(cfg.tokenizer)
    cfg.dataset.tokenizer = tokenizer
    cfg.model.vocab_size = tokenizer.vocab_size
    cfg.model.should_pad_vocab = True

    def model_provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        cfg.model._pg_collection = pg_collection
        (model,) = set_weights([cfg.model.provide(pre_process, post_process, vp_stage)])
        pretrain_tiny.MODELS.append(model)
        return model

    def datasets_provider(samples: list[int], vp_stage: int | None = None) -> Any:
        return pretrain_train_valid_test_datasets_provider(samples, cfg.dataset)

    datasets_provider.is_distributed = True
    pretrain_tiny.model_provider = model_provider
    pretrain_tiny.datasets_provider = datasets_provider
    pretrain_tiny.train()
    pretrain_tiny.write_results()


if __name__ == "__main__":
    main()
