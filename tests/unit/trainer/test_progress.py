"""What a run shows."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.loop import TrainingResult
from megatron_snip.trainer.progress import describe, print_summary, show_progress

METRICS = {"loss": 2.5, "tokens_per_s": 12345.6, "lowest_precision_fraction": 0.75}
CONFIG = TrainConfig(train_iters=40, snip={"enabled": True})


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def shown(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_metrics_in_words() -> None:
    assert describe(CONFIG, METRICS) == "loss 2.5000  12,346 tokens/s  fp4 75%"
    with_validation = describe(CONFIG, {**METRICS, "validation_loss": 3.0})
    assert with_validation == "loss 2.5000  validation 3.0000  12,346 tokens/s  fp4 75%"
    assert "fp4" not in describe(TrainConfig(), METRICS)


def test_plain_lines_are_few_and_show_every_validation() -> None:
    screen = console(terminal=False)
    with show_progress(CONFIG, screen) as listener:
        for step in range(40):
            extra = {"validation_loss": 3.0} if step == 5 else {}
            listener(step, {**METRICS, **extra})
    lines = shown(screen).splitlines()
    assert len(lines) == 21 and sum("validation" in line for line in lines) == 1


def test_a_terminal_gets_a_bar() -> None:
    screen = console(terminal=True)
    with show_progress(CONFIG, screen) as listener:
        for step in range(40):
            listener(step, METRICS)
    assert "40/40" in shown(screen) and "fp4 75%" in shown(screen)


def test_other_ranks_show_nothing() -> None:
    with show_progress(CONFIG, None) as listener:
        listener(0, METRICS)


def test_the_summary_names_losses_and_paths() -> None:
    screen = console(terminal=False)
    result = TrainingResult(40, 2.5, 5.9, 2.6, 12.0)
    print_summary(CONFIG, result, screen, [Path("runs/x/metrics.jsonl")])
    text = shown(screen)
    assert "5.9000 before training, 2.6000 after" in text
    assert "runs/x/metrics.jsonl" in text
