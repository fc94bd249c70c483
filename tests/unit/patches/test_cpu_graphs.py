"""CUDA graphs that are imitated on the CPU: a replay repeats the capture on the same storages."""

from collections.abc import Callable

import pytest
import torch

from megatron_snip.patches.cpu.graphs import CUDAGraph, graph, is_capturing


class Trained:
    """A small model whose gradients add up in `main_grad`, as under Megatron's DDP."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.model = torch.nn.Sequential(first, torch.nn.GELU(), second).bfloat16()
        self.input = torch.randn(4, 8).bfloat16()
        self.scale: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        for parameter in self.model.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)

    def step(self) -> torch.Tensor:
        loss = self.model(self.scale(self.input)).float().square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        found = [p.main_grad.clone() for p in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.main_grad.zero_()
        return found


def captured(trained: Trained) -> tuple[CUDAGraph, torch.Tensor]:
    recorded = CUDAGraph()
    with graph(recorded, pool=(0, 0), capture_error_mode="thread_local"):
        assert is_capturing()
        loss = trained.step()
    assert not is_capturing()
    return recorded, loss


def test_a_capture_changes_nothing_and_a_replay_does_what_the_step_does() -> None:
    trained = Trained()
    random = torch.get_rng_state()
    recorded, loss = captured(trained)
    assert not any(grad.any() for grad in trained.gradients())
    assert torch.equal(random, torch.get_rng_state())
    for _ in range(2):
        with torch.no_grad():
            trained.input.copy_(torch.randn(4, 8))
            trained.model[0].weight.mul_(1.5)
        recorded.replay()
        replayed = loss.clone(), trained.gradients()
        assert torch.equal(replayed[0], trained.step())
        pairs = zip(replayed[1], trained.gradients(), strict=True)
        assert all(torch.equal(ours, eager) for ours, eager in pairs)


def test_a_replay_repeats_the_python_of_its_capture() -> None:
    trained = Trained()
    recorded, loss = captured(trained)
    trained.scale = lambda x: 2 * x
    recorded.replay()
    assert loss != trained.step()
    recorded, loss = captured(trained)
    recorded.replay()
    assert loss == trained.step()


def test_replays_draw_new_random_numbers() -> None:
    recorded, out = CUDAGraph(), torch.zeros(4)
    with graph(recorded):
        out.copy_(torch.rand(4))
    assert not out.any()
    torch.manual_seed(3)
    wanted = [torch.rand(4) for _ in range(2)]
    torch.manual_seed(3)
    for numbers in wanted:
        recorded.replay()
        assert torch.equal(out, numbers)


def test_misuse_and_errors_are_refused() -> None:
    recorded = CUDAGraph()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        recorded.replay()
    with pytest.raises(RuntimeError, match="not permitted"), graph(recorded), graph(CUDAGraph()):
        pass
    weight = torch.ones(2)
    with pytest.raises(ZeroDivisionError), graph(recorded):
        weight.add_(1 / 0)
    assert not is_capturing()
    with graph(recorded):
        weight.add_(1)
    recorded.replay()
    assert weight.tolist() == [2, 2]
    recorded.reset()
    with pytest.raises(RuntimeError, match="capture"):
        recorded.replay()
