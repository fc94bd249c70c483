"""Plans that break the loss go, and training is as if they had not been, or recovers."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_snip.linears import quantized_linear as gemms
from megatron_snip.run.schedule import Schedule, ScheduleState
from megatron_snip.types import Gemm, Operand
from tests.distributed import small_model
from tests.distributed.layouts import OVERLAP, TP2, OnRanks, names, results_on
from tests.distributed.small_model import NARROW, SolverHere, SyntheticTokens, Trainer, layout

LAYOUTS = {"tp": TP2, "dp": OVERLAP}
START = 15
GUARDED: dict[str, Any] = {
    "interval": 200,
    "start_step": START + 1,
    "lag": 1,
    "efficiency_target": 1.0,
}
"""One refresh, when the model has learned something; its plan comes before the step after."""


class Cycles(SyntheticTokens):
    """Tokens that count to 8 again and again, but for one in thirty: learned within 15 steps."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(7919 * index + 1)
        sample = super().__getitem__(index)
        count = self._length + 1
        tokens = (int(torch.randint(8, (), generator=generator)) + torch.arange(count)) % 8
        odd = torch.rand(count, generator=generator) < 0.03
        tokens = tokens.where(~odd, torch.randint(0, 256, (count,), generator=generator))
        return {**sample, "tokens": tokens[:-1], "labels": tokens[1:]}


@contextmanager
def learnable(values: dict[str, Any]) -> Iterator[Trainer]:
    batch = {"seq_length": 64, "global_batch_size": 8, "lr": 5e-3}
    learned = mock.patch.object(small_model, "SyntheticTokens", Cycles)
    with learned, layout({**NARROW, **batch, **values}) as trainer:
        yield trainer


def _nan_gradient(tensor: torch.Tensor, operand: Operand, gemm: Gemm) -> torch.Tensor:
    return torch.full_like(tensor, math.nan) if operand is Operand.GRAD_OUTPUT else tensor


def _nan_loss(tensor: torch.Tensor, operand: Operand, gemm: Gemm) -> torch.Tensor:
    return torch.full_like(tensor, math.inf) if operand is Operand.INPUT else tensor


def _useless(tensor: torch.Tensor, operand: Operand, gemm: Gemm) -> torch.Tensor:
    return tensor * -30.0 if operand is Operand.WEIGHT else tensor


@contextmanager
def broken_format(broken: str, change: Any) -> Iterator[None]:
    """Within, operands in the format called `broken` are changed."""
    single = gemms.quantize_dequantize_operand
    pair = gemms.quantize_dequantize_pair

    def operand(x: torch.Tensor, name: Any, role: Operand, gemm: Gemm, **options: Any) -> Any:
        seen = single(x, name, role, gemm, **options)
        return change(seen, role, gemm) if name == broken else seen

    def both(x: torch.Tensor, names: Any, role: Operand, **options: Any) -> Any:
        first = Gemm.FPROP if role is Operand.INPUT else Gemm.DGRAD
        parts = zip(pair(x, names, role, **options), names, (first, Gemm.WGRAD), strict=True)
        return tuple(change(t, role, gemm) if name == broken else t for t, name, gemm in parts)

    with (
        mock.patch.object(gemms, "quantize_dequantize_operand", operand),
        mock.patch.object(gemms, "quantize_dequantize_pair", both),
    ):
        yield


BREAKS = {"gradient": _nan_gradient, "loss": _nan_loss, "useless": _useless}


@contextmanager
def only_first_refresh() -> Iterator[None]:
    """Let the first refresh be the only one: the run then becomes one that never had a plan."""
    due_since = Schedule.due_since

    def since(
        self: Schedule, state: ScheduleState, done: int, iteration: int, wanted_at: int | None
    ) -> int | None:
        return (
            due_since(self, state, done, iteration, wanted_at) if iteration <= START + 1 else None
        )

    with mock.patch.object(Schedule, "due_since", since):
        yield


def bad_plans(values: dict[str, Any]) -> dict[str, Any]:
    """On ranks: plans that break a step, and the run that never had one."""
    runs = {how: _bad_plan(values, how) for how in BREAKS}
    with learnable(values) as trainer:
        trainer.advance(START + 4)
        runs["plain"] = trainer.digests()
    return runs


def _bad_plan(values: dict[str, Any], how: str) -> dict[str, Any]:
    with learnable(values) as trainer, broken_format("fp4", BREAKS[how]), only_first_refresh():
        controller = trainer.controller(GUARDED, SolverHere())
        trainer.advance(START + 4, controller)
        controller.close()
        return {
            **trainer.digests(),
            "history": controller.history,
            "digest": controller.plan.digest,
            "bf16": sorted({str(option) for option in controller.plan.linears.values()}),
            "events": [(i, notice.kind) for i, notice in trainer.events.notices],
            "warnings": trainer.warnings,
            "planned": [(i, a.plan.iteration, a.num_changed) for i, a in trainer.events.applied],
        }


results = results_on(2, "tests.distributed.test_bad_plans:bad_plans", LAYOUTS)


@pytest.mark.parametrize("name", names(LAYOUTS, []))
@pytest.mark.parametrize("how", BREAKS)
def test_a_plan_that_breaks_a_step_leaves_no_trace(results: OnRanks, name: str, how: str) -> None:
    for rank, runs in enumerate(results(name)):
        run, plain = runs[how], runs["plain"]
        assert {key: run[key] for key in plain} == plain
        # Applied before this iteration, reverted within it; the digest is that of BF16 throughout.
        step = START + 2
        assert [at for at, _ in run["history"]] == [step, step]
        assert run["history"][1][1] == run["digest"] != run["history"][0][1]
        assert run["bf16"] == ["bf16"]
        assert run["events"] == [[step, "guard"], [step, "reverted"]]
        assert run["planned"] == [[step, START + 1, 8], [step, step, 8]]
        assert len(run["warnings"]) == (2 if rank == 0 else 0)
