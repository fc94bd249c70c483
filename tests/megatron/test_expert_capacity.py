"""Static expert buffers: a pass that overflows is repeated by Megatron, and the last one counts."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import paged_stash

from megatron_snip.formats import FORMATS
from megatron_snip.linears.runtime import Runtime
from megatron_snip.patches import cpu, expert_capacity
from megatron_snip.patches.graphs import Graphs
from megatron_snip.patches.registry import Registry, Session
from megatron_snip.statistics.observer import StepObserver
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import Placement, Topology

LINEAR = Placement("decoder.layers.0.mlp.linear_fc1", 0, "column", 32, 64)
TOKENS = 32


@pytest.fixture
def session() -> Iterator[Session]:
    cpu.install()
    registry = Registry((expert_capacity.measured_pass, expert_capacity.repeated_pass))
    registry.install({"--snip"})
    model: Any = SimpleNamespace(runtime=Runtime(Topology(), 7))
    registry.session.graphs = Graphs(model)
    yield registry.session
    registry.uninstall()
    cpu.uninstall()


class Chunk(torch.nn.Module):
    """A model chunk without layers, as far as the runner asks."""

    mtp_process = False

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(moe_paged_stash=True)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList()

    def zero_grad_buffer(self) -> None: ...


class Job:
    """One linear under Megatron's runner; the first `overflows` passes do not fit."""

    def __init__(self, session: Session, overflows: int) -> None:
        self.runtime = session.graphs.model.runtime
        self.chunk = Chunk()
        self.passes: list[tuple[bool, float | None]] = []
        self.overflows = overflows
        self.runner = paged_stash.PagedStashRunner(
            self.chunk.config, False, [self.chunk], None, self.schedule
        )
        self.sender = SimpleNamespace(moe_expert_rank_capacity_factor=1.5)
        settings = SimpleNamespace(moe_expert_rank_capacity_factor=1.5)
        dispatcher = SimpleNamespace(
            _comm_manager=self.sender,
            config=settings,
            reset_over_budget=lambda: None,
            invalidate_ep_bootstrap=lambda: None,  # of 0.20
        )
        self.runner.moe_layers = [SimpleNamespace(token_dispatcher=dispatcher)]
        self.runner.check_moe_overflow = self.check

    def check(self) -> tuple[int, int, int]:
        self.overflows -= 1
        return 0, int(self.overflows >= 0), 0

    def schedule(self, **kwargs: Any) -> list[Any]:
        limit = self.sender.moe_expert_rank_capacity_factor
        self.passes.append((self.chunk.config.moe_paged_stash, limit))
        if self.runtime.observer is not None:
            x = torch.randn(TOKENS, 32)
            weight = torch.randn(64, 32, requires_grad=True)
            self.runtime.observer.observe(LINEAR, x, weight, x @ weight.t()).sum().backward()
        return [{}]

    def run(self) -> None:
        data = iter([{}] * 4)
        call = {"model": [self.chunk], "data_iterator": data, "num_microbatches": 1}
        with self.runtime.training_pass(1):
            self.runner(**call, seq_length=TOKENS, forward_only=False)


def test_a_measured_pass_has_no_static_buffers(session: Session) -> None:
    job = Job(session, overflows=0)
    job.run()
    with job.runtime.observed_by(observer()):
        job.run()
    job.run()
    assert job.passes == [(True, 1.5), (False, None), (True, 1.5)]


def test_a_repeated_pass_is_the_one_that_counts(session: Session) -> None:
    job = Job(session, overflows=1)
    found = observer()
    with job.runtime.observed_by(found):
        job.run()
    assert len(job.passes) == 2
    (linear,) = found.table([LINEAR.info], 1.0, 0.0)[0].linears
    assert linear.tokens == TOKENS


def observer() -> StepObserver:
    return StepObserver(MeasureSettings({"fp8": FORMATS["fp8"]}, 1, 7), Topology())
