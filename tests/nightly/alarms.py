"""Twenty ordinary runs whose plans change all the time: the guard must revert none of them.

    python -m tests.nightly.alarms [--runs 20] [--seed 0]

Each trains a small model on the text of Python's standard library with SNIP's own plans (a refresh
every twelve steps, FP4 for half or three quarters of the work, the guard as it is by default).
Seeds, learning rates and warm-ups differ, and twice a run the learning rate jumps 6- to 20-fold for
3 to 6 steps. An iteration that the guard runs twice, keeping the plan, is counted and no alarm.
tests/unit/test_guard.py asks the same of recorded losses, for every iteration at which a plan could
have changed. Exit status 1 for any reverted plan.
"""

import argparse
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.distributed.launch import run_ranks
from tests.distributed.workers import small_model
from tests.distributed.workers.controller import MODEL
from tests.distributed.workers.small_model import SyntheticTokens, layout

STEPS = 84
TIMEOUT_S = 20_000.0


class Text(SyntheticTokens):
    """Bytes of Python's standard library; the samples are a function of seed and index."""

    content = torch.zeros(0, dtype=torch.long)
    seed = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + index)
        last = len(self.content) - self._length - 1
        start = int(torch.randint(last, (), generator=generator))
        tokens = self.content[start : start + self._length + 1]
        return {**super().__getitem__(index), "tokens": tokens[:-1], "labels": tokens[1:]}


def runs(seeds: list[int]) -> list[dict[str, Any]]:
    """Train with each seed on this rank; return what the guard did."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    Text.content = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    small_model.SyntheticTokens = Text  # type: ignore[misc]
    return [_run(seed) for seed in seeds]


def _run(seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    Text.seed = seed
    values = {
        **MODEL,
        "seed": 1 + seed,
        "train_iters": STEPS,
        "seq_length": 64,
        "global_batch_size": 8,
        "lr": 10 ** dice.uniform(-3.2, -2.3),
        "lr_warmup_iters": dice.choice((1, 5, 20)),
    }
    snip = {"interval": 12, "start_step": 6, "lag": 2}
    snip["efficiency_target"] = dice.choice((0.5, 0.75))
    factors = {}
    for first in (dice.randint(16, 40), dice.randint(48, 72)):
        factor = round(dice.uniform(6.0, 20.0), 1)
        factors |= dict.fromkeys(range(first, first + dice.randint(3, 6)), factor)
    with layout(values) as trainer:
        controller: Any = trainer.controller(snip)
        forward_backward = controller.forward_backward

        def spiking(iteration: int, *args: Any, **kwargs: Any) -> Any:
            for group in trainer.state.optimizer.param_groups:  # the scheduler sets it anew
                group["lr"] *= factors.get(iteration, 1.0)
            return forward_backward(iteration, *args, **kwargs)

        controller.forward_backward = spiking
        trainer.advance(STEPS, controller)
        controller.close()
        kinds = Counter(notice.kind for _, notice in trainer.events.notices)
        plans = len(controller.history)
        return {"seed": seed, "plans": plans, "reverted": kinds["reverted"], **kinds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    args = parser.parse_args()
    seeds = list(range(args.seed, args.seed + args.runs))
    (rows,) = run_ranks(1, "tests.nightly.alarms:runs", {"seeds": seeds}, timeout_s=TIMEOUT_S)
    print(*rows, sep="\n")
    # A run in which no plan was ever applied would prove nothing.
    return int(any(row["reverted"] or not row["plans"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
