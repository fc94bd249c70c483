"""Small runs whose losses, gradient norms and plans are files: tests/frozen/NAME.json.

    python -m tests.distributed.frozen_runs           # compare, as the test does
    python -m tests.distributed.frozen_runs --write   # replace the files

docs/proof.md has the rule: a change that claims to change nothing leaves these files alone.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_snip.planning.problem import PlanningProblem
from tests.distributed.launch import Server, run_ranks, shared_server
from tests.distributed.layouts import EP2, PP2, SP, TP2
from tests.distributed.small_model import NARROW, Trainer, layout

FOLDER = Path(__file__).parents[1] / "frozen"
STEPS = 10
RTOL = {
    "loss": (1e-4, 5e-3),
    "grad_norm": (1e-3, 1e-1),
    "quality_loss": (3e-2, 2e-1),
    "plans": (0.0, 0.0),
}
"""Relative differences on another CPU, up to the first plan and after it (docs/proof.md).

Its sums have another order. From the first plan on stochastic rounding makes more of it. Twice to
six times what AVX2 and SSE code gave against AVX-512."""


@dataclass(frozen=True)
class FrozenRun:
    """A run of STEPS steps: its ranks, the model's and SNIP's settings."""

    ranks: int = 1
    values: dict[str, Any] = field(default_factory=dict)
    snip: dict[str, Any] = field(default_factory=dict)
    with_te: bool = False


_SNIP = {"start_step": 3, "interval": 3, "lag": 1, "efficiency_target": 0.6}
_EXPERTS = {**NARROW, "num_experts": 4, "seq_length": 64, "global_batch_size": 4}
RUNS = {
    "tp1": FrozenRun(),
    "per-gemm": FrozenRun(snip={"granularity": "gemm"}),
    "nvfp4": FrozenRun(values={"bf16": True}, snip={"formats": ["mxfp8", "nvfp4"]}),
    "tp2-sp": FrozenRun(2, {**TP2, **SP, "bf16": True}),
    "pp2-stage": FrozenRun(2, PP2, {"pipeline_balance": "stage"}),
    "ep2": FrozenRun(2, {**_EXPERTS, **EP2}),
    "te": FrozenRun(values={"bf16": True, "num_layers": 1, "seq_length": 128}, with_te=True),
}


def frozen(name: str) -> dict[str, Any]:
    """On ranks: what the file of a run holds."""
    run = RUNS[name]
    # An even D: where v is tiny, D would amplify the order in which gradients are added.
    with layout({"adam_eps": 1e-4, "lr": 1e-3, **run.values}) as trainer:
        trainer.run(STEPS, {"formats": ["fp8", "fp4"], **_SNIP, **run.snip})
        return numbers(trainer)


def numbers(trainer: Trainer) -> dict[str, Any]:
    """A run's numbers: exact floats, which JSON keeps."""
    metrics = [values for _, values in trainer.events.metrics]
    return {
        "loss": [values["loss"] for values in metrics],
        "grad_norm": [values["grad_norm"] for values in metrics],
        "plans": [[i, applied.plan.digest] for i, applied in trainer.events.applied],
        "quality_loss": [[i, *_scores(m.problem)] for i, m in trainer.events.measured],
    }


def _scores(problem: PlanningProblem) -> list[float]:
    """Quality loss of each linear, summed over its options."""
    return [
        sum(option.quality_loss or 0.0 for option in linear.options.values())
        for linear in problem.linears
    ]


def bits_of_this_machine() -> str:
    """On a rank: a digest of a few operations' results. Equal digests: equal bits are wanted."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(64, 256, generator=generator) for _ in range(2))
    results = [a @ b.T, torch.softmax(a, -1), torch.nn.functional.silu(b), a.sum(0), a.norm()]
    results += [(a.bfloat16() @ b.bfloat16().T).float(), a.exp().mean(-1), (a[:9] @ b[:33].T)]
    digest = hashlib.sha256(torch.__version__.encode())
    for result in results:
        digest.update(result.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


@contextmanager
def running() -> Iterator[Any]:
    """Within: a function from a run's name to its numbers, the same on each rank."""
    with closing(Server(preload=["tests.distributed.te_models"])) as with_te:

        def run(name: str) -> dict[str, Any]:
            chosen = RUNS[name]
            server, worker = shared_server(), "frozen_runs:frozen"
            if chosen.with_te:
                server = with_te
                worker = "te_models:frozen_numbers"
            worker = f"tests.distributed.{worker}"
            results = run_ranks(chosen.ranks, worker, {"name": name}, server)
            assert all(result == results[0] for result in results), f"{name}: ranks differ"
            (machine,) = run_ranks(1, "tests.distributed.frozen_runs:bits_of_this_machine")
            return {"machine": machine, **results[0]}

        yield run


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """One line for each number that differs: in a bit on the same machine, else by more than RTOL.

    Plans and the iterations of refreshes must be equal everywhere.
    """
    is_same = found["machine"] == wanted["machine"]
    first_plan = wanted["plans"][0][0]
    lines = []
    for key, (before, after) in RTOL.items():
        if len(found[key]) != len(wanted[key]):
            lines.append(f"{key}: {len(found[key])} values, wanted {len(wanted[key])}")
            continue
        for index, (a, b) in enumerate(zip(found[key], wanted[key], strict=True)):
            iteration = b[0] if isinstance(b, list) else index + 1
            rtol = before if iteration < first_plan else after
            if not _agree(a, b, 0.0 if is_same else rtol):
                lines.append(f"{key}[{index}]: {a}, wanted {b}")
    return lines


def _agree(a: Any, b: Any, rtol: float) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(_agree(x, y, rtol) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return abs(a - b) <= rtol * abs(b)
    return bool(a == b)


def read(name: str) -> dict[str, Any]:
    """The file of a run."""
    return dict(json.loads((FOLDER / f"{name}.json").read_text()))


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the files")
    write = parser.parse_args().write
    with running() as run:
        for name in RUNS:
            found = run(name)
            file = FOLDER / f"{name}.json"
            lines = differences(found, read(name)) if file.exists() else ["no file"]
            print(f"{name}: {'equal' if not lines else '; '.join(lines)}")
            if write:
                rows = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
                file.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    _main()
