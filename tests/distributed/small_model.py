"""A small GPTModel on synthetic tokens, in any layout, for checks that run on ranks.

    with layout({"tensor_model_parallel_size": 2}) as trainer:
        trainer.run(10, snip={"interval": 5})

Weights, data and their order do not depend on the layout (see `trainer.model` and
`trainer.data`), so what two layouts measure and decide can be compared.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_snip.config import SnipConfig
from megatron_snip.errors import SnipError
from megatron_snip.linears.runtime import MicrobatchTokens
from megatron_snip.log import forget_warnings
from megatron_snip.patches import cpu
from megatron_snip.planning.plan import PrecisionPlan, write_plan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.reporting.events import (
    Event,
    Measurement,
    Metrics,
    Notice,
    PlanApplied,
    Settings,
    Writer,
)
from megatron_snip.run import solve
from megatron_snip.run.controller import SnipController
from megatron_snip.run.state import RunState
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.trainer.config import TrainConfig, make_train_config
from megatron_snip.trainer.loop import PlainTraining, TrainingHook, train_step
from megatron_snip.trainer.model import (
    TrainingState,
    build_training_state,
    destroy_parallel_state,
    initialize_parallel_state,
)

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 64,
    "global_batch_size": 4,
    "train_iters": 40,
    "lr_warmup_iters": 1,
    "bf16": False,
    "eval_iters": 0,
    "run_dir": Path("unused"),
}
"""Shards of two tensor-parallel ranks are multiples of 128, so tiles never straddle them."""


NARROW: dict[str, Any] = {
    "hidden_size": 128,
    "ffn_hidden_size": 128,
    "num_attention_heads": 2,
    "seq_length": 16,
    "global_batch_size": 2,
}
"""Changes for runs of many steps."""


class SyntheticTokens:
    """Samples that are functions of their index: runs of a noisy arithmetic progression."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self._length = length
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(7919 * index + 1)
        start, stride = torch.randint(1, self._vocabulary, (2,), generator=generator).tolist()
        tokens = start + (stride % 7) * torch.arange(self._length + 1)
        noise = torch.randint(0, 2, tokens.shape, generator=generator)
        tokens = (tokens + noise) % self._vocabulary
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }


class Memory:
    """A writer that keeps events, by kind, as (iteration, payload)."""

    def __init__(self) -> None:
        self.measured: list[tuple[int, Measurement]] = []
        self.applied: list[tuple[int, PlanApplied]] = []
        self.metrics: list[tuple[int, dict[str, Any]]] = []
        self.notices: list[tuple[int, Notice]] = []
        self.settings: list[tuple[int, Settings]] = []

    def write(self, event: Event) -> None:
        lists: dict[type, list[Any]] = {
            Measurement: self.measured,
            PlanApplied: self.applied,
            Notice: self.notices,
            Settings: self.settings,
        }
        if isinstance(event.payload, Metrics):
            self.metrics.append((event.iteration, event.payload.values))
        else:
            lists[type(event.payload)].append((event.iteration, event.payload))

    def close(self) -> None:
        pass


class Warnings(logging.Handler):
    """Collects what the package logs as a warning, but for tiles that small shards cut.

    Failures with a traceback, which the rank that failed logs, are apart from the warnings.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            self.tracebacks.append(record.getMessage())
        elif "is not a multiple of 128" not in record.getMessage():
            self.texts.append(record.getMessage())


class SolverHere:
    """Solves in this process: to start another takes longer than most runs."""

    def submit(self, problem: PlanningProblem, *arguments: Any) -> None:
        self._future: Future[PrecisionPlan] = Future()
        try:
            self._future.set_result(make_plan(problem, *arguments))
        except SnipError as error:
            self._future.set_exception(error)

    def ready(self) -> bool:
        return True

    def result(self, timeout_s: float) -> PrecisionPlan:
        return self._future.result()

    def replace(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Trainer:
    """A built model and its optimizer, trained step by step."""

    config: TrainConfig
    state: TrainingState
    losses: list[float] = field(default_factory=list)
    events: Memory = field(default_factory=Memory)  # of the last controller
    warnings: list[str] = field(default_factory=list)  # since the model was built
    tracebacks: list[str] = field(default_factory=list)  # their messages, likewise
    step: int = 0

    @property
    def samples(self) -> SyntheticTokens:
        return SyntheticTokens(self.config.seq_length, 256)

    def controller(
        self,
        snip: dict[str, Any],
        solver: Any = None,
        state: RunState | None = None,
        writers: Sequence[Writer] = (),
        num_done: int = 0,
    ) -> SnipController:
        """Attach SNIP; events are kept on all ranks (the controller needs a writer on one)."""
        self.events = Memory()
        return SnipController(
            SnipConfig(**snip),
            list(self.state.model),
            self.state.optimizer,
            writers=[*writers, self.events],
            state=state,
            solver=solver,
            tokens=MicrobatchTokens(self.config.micro_batch_size * self.config.seq_length),
            train_iters=self.config.train_iters,
            num_done=num_done,
        )

    def advance(self, steps: int, hook: TrainingHook | None = None) -> None:
        """Make `steps` training steps, as the trainer's own loop does; without a hook no SNIP."""
        hook = hook or PlainTraining()
        for _ in range(steps):
            metrics = train_step(self.step + 1, self.state, self.samples, hook)
            self.losses.append(metrics["loss"])
            self.step += 1
            hook.end_iteration(self.step, metrics)

    def run(self, steps: int, snip: dict[str, Any]) -> SnipController:
        controller = self.controller(snip)
        self.advance(steps, controller)
        controller.close()
        return controller

    def digests(self) -> dict[str, Any]:
        """Bits of what training has made: losses, this rank's weights and optimizer state."""
        return {
            "losses": [loss.hex() for loss in self.losses],
            "weights": digest([p for c in self.state.model for p in c.parameters()]),
            "optimizer": digest(optimizer_tensors(self.state.optimizer)),
        }


def optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Every tensor of a (chained) Megatron optimizer: main weights and moments, in order."""
    found: list[torch.Tensor] = []
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                state = part.optimizer.state.get(param, {})
                found.append(param)
                found += [torch.as_tensor(state[key]) for key in sorted(state)]
    return found


def digest(tensors: list[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def prepare_rank() -> None:
    """Let this process train on CPUs, and wait for its solver."""
    cpu.install()
    solve.SOLVER_GRACE_S = 600.0  # a slow machine takes its time to start the solver


@contextmanager
def layout(values: dict[str, Any]) -> Iterator[Trainer]:
    """Build the small model in one layout; parallel groups are destroyed at the end."""
    prepare_rank()
    config = make_train_config({**SMALL, **values})
    initialize_parallel_state(config)
    listener = Warnings()
    logger = logging.getLogger("megatron_snip")
    logger.addHandler(listener)
    forget_warnings()
    try:
        state = build_training_state(config)
        yield Trainer(config, state, warnings=listener.texts, tracebacks=listener.tracebacks)
    finally:
        logger.removeHandler(listener)
        destroy_parallel_state()


def save_random_plan(trainer: Trainer, file: Path, **snip: Any) -> None:
    """Write the plan of the policy `random` for a target of a half."""
    controller = trainer.controller({"policy": "random", "efficiency_target": 0.5, **snip})
    if dist.get_rank() == 0:
        write_plan(controller.plan, file)
    controller.close()
    dist.barrier()


def refresh_json(trainer: Trainer, controller: SnipController) -> dict[str, Any]:
    """What the first refresh found and what was decided after it."""
    _, refresh = trainer.events.measured[0]
    return {
        "plan": {n: str(o) for n, o in controller.plan.linears.items()},
        "history": controller.history,
        "statistics": statistics_json(refresh.divergences.statistics),
        "health": refresh.health.to_dict()["linears"],
        "divergences": {
            name: {str(o): vars(d) for o, d in row.items()}
            for name, row in refresh.divergences.linears.items()
        },
        "stages": {row.name: row.stage for row in refresh.problem.linears},
        "warnings": trainer.warnings,
    }


def statistics_json(table: StatisticsTable) -> dict[str, Any]:
    """A table as {linear: {field or format.field: value}}."""
    rows: dict[str, Any] = {}
    for linear in table.linears:
        row = {k: v for k, v in vars(linear).items() if isinstance(v, int | float)}
        for name, statistics in linear.formats.items():
            values = vars(statistics) | statistics.added
            row |= {f"{name}.{k}": v for k, v in values.items() if k != "added"}
        rows[linear.name] = row
    return {"loss": table.loss, "linears": rows}
