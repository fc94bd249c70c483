"""What a run shows while it runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_snip.trainer.config import TrainConfig
from megatron_snip.trainer.loop import Listener, TrainingResult

LINES = 20
"""Plain lines that a whole run prints, about."""


@contextmanager
def show_progress(config: TrainConfig, console: Console | None) -> Iterator[Listener]:
    """Yield a listener that shows each step.

    Args:
        config: the run's settings.
        console: where to show; None shows nothing.
    """
    if console is None:
        yield lambda step, metrics: None
    elif console.is_terminal:
        yield from _bar(config, console)
    else:
        yield lambda step, metrics: _line(config, console, step, metrics)


def describe(config: TrainConfig, metrics: dict[str, Any]) -> str:
    """Return a step's metrics in a few words."""
    words = [f"loss {metrics['loss']:.4f}"]
    if "validation_loss" in metrics:
        words.append(f"validation {metrics['validation_loss']:.4f}")
    words.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    if config.snip.enabled:
        share = metrics["lowest_precision_fraction"]
        words.append(f"{config.snip.lowest_formats} {100 * share:.0f}%")
    return "  ".join(words)


def _bar(config: TrainConfig, console: Console) -> Iterator[Listener]:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=config.train_iters, words="")
        last: dict[str, Any] = {}

        def show(step: int, metrics: dict[str, Any]) -> None:
            last.update(metrics)  # the last validation loss stays in view
            progress.update(task, advance=1, words=describe(config, last))

        yield show


def _line(config: TrainConfig, console: Console, step: int, metrics: dict[str, Any]) -> None:
    every = max(1, config.train_iters // LINES)
    if step % every == 0 or step == 1 or "validation_loss" in metrics:
        console.print(f"iteration {step:>5}/{config.train_iters}  {describe(config, metrics)}")
        sys.stdout.flush()


def print_summary(
    config: TrainConfig, result: TrainingResult, console: Console, written: list[Path]
) -> None:
    """Print how the run ended and where its files are."""
    if math.isnan(result.loss) and result.steps >= config.train_iters:
        console.print(f"nothing left to do: {result.steps} steps are done")
        return
    end = f", stopped by {result.stopped}" if result.stopped else ""
    console.print(
        f"{result.steps} steps in {result.seconds:.0f} s, training loss {result.loss:.4f}{end}"
    )
    if result.stopped and config.save is not None:
        console.print(f"to go on: the same command with --load {config.save}", soft_wrap=True)
    if result.validation_loss is not None and result.first_validation_loss is not None:
        console.print(
            f"validation loss {result.first_validation_loss:.4f} before training, "
            f"{result.validation_loss:.4f} after"
        )
    console.print("written:")
    for path in written:
        console.print(f"  {path}", soft_wrap=True)
