"""Record the loss curves that the guard must stay silent on: 20 real runs of a small model.

    python -m tests.nightly.loss_curves > tests/unit/loss_curves.json

Each is a two-block transformer on the text of Python's standard library, with AdamW, warm-up, a
cosine schedule and two spikes of the learning rate (6- to 20-fold, for 3 to 6 steps) at random.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path

import torch
from torch import nn

STEPS = 160
SEEDS = range(20)
WIDTH, LENGTH, BATCH = 64, 64, 8


class Model(nn.Module):
    """Two causal transformer blocks over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [b, s, 256] for tokens [b, s]."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.out(self.blocks(x, mask=mask, is_causal=True))


def curve(seed: int, text: torch.Tensor) -> dict[str, object]:
    """Train once; return the seed, the spikes and the losses."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    model = Model()
    base = 10 ** dice.uniform(-3.2, -2.3)
    warm_up = dice.choice((1, 5, 20))
    spikes = [
        (at, dice.randint(3, 6), round(dice.uniform(6, 20), 1))
        for at in (dice.randint(30, 80), dice.randint(90, 140))
    ]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        lr = base * min(1.0, (step + 1) / warm_up)
        lr *= 0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS))
        for at, length, factor in spikes:
            lr *= factor if at <= step < at + length else 1.0
        for group in optimizer.param_groups:
            group["lr"] = lr
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,))
        rows = torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()])
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 256), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(round(loss.item(), 4))
    return {"seed": seed, "spikes": spikes, "warm_up": warm_up, "lr": base, "losses": losses}


def main() -> int:
    torch.set_num_threads(1)
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.long)
    print(json.dumps({"version": 1, "curves": [curve(seed, text) for seed in SEEDS]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
