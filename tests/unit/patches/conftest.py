"""The fixture `fake`: a `megatron.training` of a few lines with the real one's signatures.

The wheel of megatron-core 0.16.1 has no `megatron.training`; these modules take its place.
"""

import argparse
import sys
from types import ModuleType
from typing import Any

import pytest

ARGS: dict[str, Any] = {
    "iteration": 0,
    "curr_iteration": 5,
    "seq_length": 8,
    "log_interval": 2,
    "num_layers": 4,
    "ckpt_format": "torch_dist",
    "rank": 0,
    "save": None,
}


class FakeMegatron:
    """The modules; `args` is Megatron's namespace, `calls` records some of the calls."""

    arguments: Any
    checkpointing: Any
    global_vars: Any
    training: Any

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.args = argparse.Namespace(**ARGS)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.aborts = False
        self.loaded: dict[str, Any] | None = {"iteration": 3}
        self.release = False
        fake: Any = self

        def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser.add_argument("--lr", type=float, default=0.1, help="50% of what it was")
            parser.add_argument("--distributed-backend", default="nccl")
            return parser

        def setup_model_and_optimizer(
            model_type, model_provider_func=None, checkpointing_context=None, *, cfg_container=None
        ):
            fake.calls.append(("setup", (model_type,), {"cfg_container": cfg_container}))
            return ["model"], "optimizer", "scheduler"

        def train_step(
            forward_step_func,
            data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            config,
            forward_backward_func,
            iteration=None,
            pg_collection=None,
        ):
            reports = forward_backward_func(data_iterator=data_iterator, model=model)
            if fake.aborts:
                return {}, True, True, True, 16, None, None, 0
            return {"lm loss": reports}, 0, False, False, 0, 2.5, None, 0

        def post_training_step_callbacks(
            model,
            optimizer,
            opt_param_scheduler,
            iteration,
            prof,
            num_floating_point_operations_since_last_log_event,
            nsys_nvtx_context=None,
        ):
            return num_floating_point_operations_since_last_log_event + 1.0

        def evaluate(forward_step_func, data_iterator, model):
            return {"lm loss": 1.5}, None, False

        def get_forward_backward_func():
            return None

        def generate_state_dict(args, model, iteration=None):
            return {"model": model}

        def _load_base_checkpoint(load_dir, args, rank0=False):
            return fake.loaded, str(load_dir), fake.release, "global"

        def validate_args(args, defaults=None):
            fake.calls.append(("validate", (args,), {}))
            return args

        def get_args():
            return fake.args

        def get_tensorboard_writer():
            return None

        training = (setup_model_and_optimizer, train_step, post_training_step_callbacks)
        modules = {
            "arguments": (add_megatron_arguments, validate_args),
            "checkpointing": (generate_state_dict, _load_base_checkpoint),
            "global_vars": (get_args, get_tensorboard_writer),
            "training": (*training, evaluate, get_forward_backward_func),
        }
        package: Any = ModuleType("megatron.training")
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
        for name, functions in modules.items():
            module = ModuleType(f"megatron.training.{name}")
            vars(module).update({function.__name__: function for function in functions})
            monkeypatch.setitem(sys.modules, module.__name__, module)
            setattr(self, name, module)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeMegatron:
    """A `megatron.training` for the length of a test."""
    return FakeMegatron(monkeypatch)
