"""Pass A on one rank: what is recorded, and what happens when measuring fails."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from megatron_snip.statistics import recorder as recorder_module
from megatron_snip.statistics.measure import Operands
from megatron_snip.statistics.recorder import MeasureSettings, Recorder
from megatron_snip.statistics.sampling import sampled_rows
from megatron_snip.topology import DataAxis, Placement, TensorAxis, Topology
from tests.unit.statistics.test_refresh import error_of_output

PLACEMENT = Placement("decoder.layers.0.mlp.linear_fc2", 0, "row", 128, 256)
SETTINGS = MeasureSettings(("fp8", "fp4"), step=4, seed=9, num_rows=6)


def operands(tokens: int = 40) -> Operands:
    return Operands(torch.randn(tokens, 128), torch.randn(256, 128), torch.randn(tokens, 256))


def test_an_observation_holds_sums_and_sampled_rows() -> None:
    o = operands()
    recorder = Recorder(SETTINGS, Topology(), {PLACEMENT.instance: torch.full((256, 128), 2.0)})
    recorder.record(PLACEMENT, o)
    (seen,) = recorder.observations[PLACEMENT.instance]
    rows = sampled_rows(40, 6, 9, 4, 0)
    assert torch.equal(seen.rows, rows)
    assert seen.sampled is not None
    assert torch.equal(seen.sampled.input, o.input[rows])
    assert seen.sampled.input.untyped_storage().nbytes() == 6 * 128 * 4  # not a view of all of X
    assert torch.equal(seen.sampled.grad, o.grad_output[rows])
    assert seen.sampled.input_amax is None  # neither fp8 nor fp4 asks
    assert seen.output_error.shape == seen.first.shape == (2, 40)
    assert seen.couplings.shape == (2, 3, 2)
    torch.testing.assert_close(seen.grad, o.grad_output.double().square().sum(1), rtol=1e-6, atol=0)
    assert torch.allclose(seen.errors[:, 4], 4 * seen.errors[:, 3], rtol=1e-5)  # D = 2
    exact = o.input.double() @ o.weight.double().T
    for f, name in enumerate(SETTINGS.formats):
        shift = (error_of_output(o.input, o.weight, name) * exact).sum()
        assert seen.errors[f, 5].item() == pytest.approx(shift.item(), rel=1e-4)
    assert seen.microbatch == 0


def test_whole_tensors_amax_is_kept_for_formats_that_scale_by_it() -> None:
    o = operands()
    recorder = Recorder(MeasureSettings(("nvfp4",), 4, 9, 6), Topology(), {})
    recorder.record(PLACEMENT, o)
    sampled = recorder.observations[PLACEMENT.instance][0].sampled
    assert sampled is not None
    assert sampled.input_amax == o.input.abs().max()
    assert sampled.grad_amax == o.grad_output.abs().max()


def test_microbatches_are_numbered_over_data_ranks() -> None:
    recorder = Recorder(SETTINGS, Topology(data=DataAxis(rank=1, size=3)), {})
    for _ in range(3):
        recorder.record(PLACEMENT, operands())
    assert [o.microbatch for o in recorder.observations[PLACEMENT.instance]] == [1, 4, 7]


def test_experts_are_numbered_over_their_own_data_ranks() -> None:
    expert = Placement(PLACEMENT.name, 0, "row", 128, 256, expert=2)
    topology = Topology(data=DataAxis(rank=1, size=4), expert_data=DataAxis(rank=1, size=2))
    recorder = Recorder(SETTINGS, topology, {})
    for _ in range(2):
        recorder.record(expert, operands())
    assert list(recorder.observations) == [expert.instance]
    assert [o.microbatch for o in recorder.observations[expert.instance]] == [1, 3]


def test_a_frozen_weight_has_no_update_to_change() -> None:
    recorder = Recorder(SETTINGS, Topology(), {})
    recorder.record(PLACEMENT, operands())
    (seen,) = recorder.observations[PLACEMENT.instance]
    assert (seen.errors[:, 3] > 0).all()
    assert (seen.errors[:, 4] == 0).all()


def test_a_failure_is_noted_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(recorder_module, "fprop_error", fail)
    recorder = Recorder(SETTINGS, Topology(), {})
    recorder.record(PLACEMENT, operands())
    recorder.record(PLACEMENT, operands())
    assert recorder.failure == f"{PLACEMENT.name}: RuntimeError: out of memory"
    seen = recorder.observations[PLACEMENT.instance]
    assert len(seen) == 2
    assert seen[0].output_error.abs().max() == 0


def test_sums_that_every_rank_holds_in_full_are_shared_out() -> None:
    """On one of 4 tensor ranks (without a group to add over) full tensors count a quarter."""
    o = operands()
    whole, part = (Recorder(SETTINGS, Topology(), {}) for _ in range(2))
    whole.record(PLACEMENT, o)
    for kind, shared, sharded in (("column", 0, 3), ("row", 3, 0)):
        axis = TensorAxis(rank=2, size=4)
        features = (128, 4 * 256) if kind == "column" else (4 * 128, 256)
        placement = Placement(PLACEMENT.name, 0, kind, *features, axis)  # type: ignore[arg-type]
        part.observations.clear()
        part.record(placement, o)
        one = whole.observations[PLACEMENT.instance][0].norms
        quarter = part.observations[placement.instance][0].norms
        assert quarter[shared].item() == pytest.approx(one[shared].item() / 4)  # X, or G
        assert quarter[sharded].item() == pytest.approx(one[sharded].item())  # G, or X
        assert quarter[1].item() == pytest.approx(one[1].item())  # W is sharded either way


def test_what_a_failed_measurement_held_is_free_before_zeros_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out of memory, there is no room for both."""
    held: list[weakref.ref[torch.Tensor]] = []
    make_zeros = Recorder._nothing

    def fail(*_: object) -> None:
        large = torch.zeros(8)
        held.append(weakref.ref(large))
        raise RuntimeError("out of memory")

    def nothing(self: Recorder, *args: Any) -> Any:
        assert held[0]() is None
        return make_zeros(self, *args)

    monkeypatch.setattr(Recorder, "_measure", fail)
    monkeypatch.setattr(Recorder, "_nothing", nothing)
    recorder = Recorder(SETTINGS, Topology(), {})
    recorder.record(PLACEMENT, operands())
    assert recorder.failure == f"{PLACEMENT.name}: RuntimeError: out of memory"
