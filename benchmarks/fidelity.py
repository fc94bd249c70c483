"""Do the divergences predict what quantizing a linear really does? Brute force is the truth.

    python -m benchmarks.fidelity [--quick] [--bf16] [--json FILE] [--plot FILE]

For each model shape and checkpoint, each linear (and each of its GEMMs) is quantized alone and the
same microbatches are run again (benchmarks/lab.py); the loss change and the change of the real
AdamW update are compared with what one refresh predicts from its two passes, and with what others
would go by. Loss changes on held-out text that the statistics have not seen are compared as well,
against the number of microbatches that the statistics used. A probe is a draw: agreements of the
defaults' weight divergence are means over refreshes with different random numbers.

In BF16 the loss is read from FP32 logits (lab.py says why); `loss_spearman_model_logits` is the
agreement with the loss as the model reports it. What is left of rounding moves that truth, too:
`loss_ceiling` is the rank correlation of a truth with itself under such noise.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.agreement import (
    LOSS,
    LOSS_SCORES,
    WEIGHT,
    WEIGHT_SCORES,
    Score,
    agreement,
    ceiling,
    local_scores,
    mean_agreement,
    scores_of,
)
from benchmarks.lab import Lab, open_lab
from benchmarks.machine import write_result
from megatron_snip.config import SnipConfig
from megatron_snip.options import Option
from megatron_snip.statistics.records import StatisticsTable


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        shapes: overrides of the lab's model.
        checkpoints: training steps at which to measure.
        formats: formats to judge.
        batches: microbatches of the same-batch truth and of the statistics.
        unseen: held-out microbatches of the unseen truth.
        counts: numbers of statistics microbatches for the unseen truth.
        draws: refreshes that the defaults' weight divergence is judged by.
        variants: settings beside a refresh's defaults for the weight divergence, by what they say.
    """

    shapes: tuple[dict[str, Any], ...]
    checkpoints: tuple[int, ...]
    formats: tuple[str, ...]
    batches: int
    unseen: int
    counts: tuple[int, ...]
    draws: int
    variants: Mapping[str, dict[str, int]]


ALL = 10**6
FOUR = {"4 probes": {"probes": 4}}
MORE = {
    **FOUR,
    "16 probes": {"probes": 16},
    "all tokens": {"probe_rows": ALL},
    "all tokens, 4 probes": {"probe_rows": ALL, "probes": 4},
}
QUICK = Size(({"num_layers": 4},), (40, 80, 120), ("fp4",), 2, 8, (1, 2, 4), 3, FOUR)
FULL = Size(
    (
        {"num_layers": 6},
        {"num_layers": 3, "hidden_size": 256, "ffn_hidden_size": 512, "num_query_groups": 2},
    ),
    (60, 120, 200),
    ("fp4",),
    2,
    8,
    (1, 2, 4),
    5,
    MORE,
)


def judge(lab: Lab, snip: SnipConfig, size: Size, tick: Callable[[], None]) -> dict[str, Any]:
    """Return the agreements at the lab's present checkpoint, and the raw points."""
    batches = lab.microbatches(size.batches)
    start = time.perf_counter()
    table = lab.statistics(batches, snip)
    seconds = time.perf_counter() - start
    tables = [table]
    for draw in range(1, size.draws):
        tables.append(lab.statistics(batches, snip.model_copy(update={"seed": snip.seed + draw})))
    more = {
        label: lab.statistics(batches, snip.model_copy(update=values))
        for label, values in size.variants.items()
    }
    base_loss, base_gradients = lab.gradients(batches)
    base_updates = lab.updates(base_gradients)
    exact_base = float(lab.losses(batches).mean())

    def exact_change(name: str, option: Option) -> float:
        return float(lab.losses(batches, {name: option}).mean()) - exact_base

    def truth(name: str, option: Option) -> tuple[float, float]:
        loss, gradients = lab.gradients(batches, {name: option})
        changed = lab.updates(gradients)
        total = sum(
            float((changed[k] - u).square().sum() / u.square().sum())
            for k, u in base_updates.items()
        )
        tick()
        return loss - base_loss, math.sqrt(total)

    found: dict[str, Any] = {"step": lab.step, "loss": base_loss, "refresh_s": seconds}
    noise = _rounding_noise(lab, batches) if lab.config.bf16 else 0.0
    for name in size.formats:
        whole = np.array([truth(linear, Option.uniform(name)) for linear in lab.names])
        reported = whole[:, 0].copy()
        if lab.config.bf16:
            whole[:, 0] = [exact_change(linear, Option.uniform(name)) for linear in lab.names]
        gemms = [
            np.array([truth(linear, only)[1] for linear in lab.names])
            for only in (
                Option(name, "bf16", "bf16"),
                Option("bf16", name, "bf16"),
                Option("bf16", "bf16", name),
            )
        ]
        found[name] = _agreements(tables, name, whole, gemms)
        for label, averaged in more.items():
            score = scores_of(averaged, name, WEIGHT_SCORES[WEIGHT])
            found[name]["weight"][f"{WEIGHT}, {label}"] = asdict(agreement(score, whole[:, 1]))
        predicted = scores_of(table, name, LOSS_SCORES[LOSS])
        found[name]["loss_model_logits"] = asdict(agreement(predicted, reported))
        found[name]["loss_noise"] = noise
        found[name]["loss_ceiling"] = ceiling(whole[:, 0], noise)
        found[name]["unseen"] = _unseen(lab, snip, size, name, tick)
    return found


def _rounding_noise(lab: Lab, batches: Sequence[Any]) -> float:
    """Root mean square of what rounding alone does to the loss, over the linears."""
    base = float(lab.losses(batches).mean())
    changes = [lab.loss_rounded_again(batches, name, i) - base for i, name in enumerate(lab.names)]
    return float(np.sqrt(np.mean(np.square(changes))))


def _agreements(
    tables: Sequence[StatisticsTable], name: str, whole: np.ndarray, gemms: list[np.ndarray]
) -> dict[str, Any]:
    table = tables[0]
    locals_ = local_scores(name)
    parts: dict[str, Score] = {
        "fprop": lambda _, f: math.sqrt(f.forward_square),
        "dgrad": lambda _, f: math.sqrt(f.backward_square),
        "wgrad": lambda _, f: math.sqrt(f.local_square),
    }
    return {
        "loss": {
            key: asdict(agreement(scores_of(table, name, score), whole[:, 0]))
            for key, score in (LOSS_SCORES | locals_).items()
        },
        "weight": {
            key: mean_agreement(tables, name, score, whole[:, 1])
            for key, score in (WEIGHT_SCORES | locals_).items()
        },
        "weight_by_gemm": {
            gemm: mean_agreement(tables, name, score, true)
            for (gemm, score), true in zip(parts.items(), gemms, strict=True)
        },
        "points": {
            "loss": [
                whole[:, 0].tolist(),
                scores_of(table, name, LOSS_SCORES[LOSS]).tolist(),
            ],
            "terms": [asdict(s.formats[name]) for s in table.linears],
            "weight": [
                whole[:, 1].tolist(),
                scores_of(table, name, WEIGHT_SCORES[WEIGHT]).tolist(),
            ],
        },
    }


def _unseen(
    lab: Lab, snip: SnipConfig, size: Size, name: str, tick: Callable[[], None]
) -> dict[str, Any]:
    """Loss changes on held-out text against statistics of growing numbers of microbatches."""
    held_out = lab.microbatches(size.unseen, held_out=True)
    base = lab.losses(held_out)
    forward = Option(name, "bf16", "bf16")  # only fprop changes the loss
    changes = []
    for linear in lab.names:
        changes.append(lab.losses(held_out, {linear: forward}) - base)
        tick()
    matrix = np.array(changes)
    true = matrix.mean(axis=1)
    growth = {}
    for count in size.counts:
        table = lab.statistics(lab.microbatches(count), snip)
        growth[str(count)] = {
            key: asdict(agreement(scores_of(table, name, score), true))
            for key, score in LOSS_SCORES.items()
        }
    noise = matrix.std(axis=1, ddof=1) / math.sqrt(matrix.shape[1])
    return {"by_microbatches": growth, "truth": true.tolist(), "truth_noise": noise.tolist()}


def summarize(results: list[dict[str, Any]], formats: tuple[str, ...]) -> dict[str, Any]:
    """Return the headline numbers: medians over checkpoints, and the worst."""
    first = formats[0]
    loss = [r[first]["loss"][LOSS]["spearman"] for r in results]
    weights = {
        key: [r[first]["weight"][key]["spearman"] for r in results]
        for key in results[0][first]["weight"]
        if key.startswith(WEIGHT)
    }
    weight = weights[WEIGHT]
    unseen = [list(r[first]["unseen"]["by_microbatches"].values())[-1] for r in results]
    best = {key: float(np.median([u[key]["spearman"] for u in unseen])) for key in LOSS_SCORES}
    return {
        "format": first,
        "loss_spearman": float(np.median(loss)),
        "loss_spearman_worst": float(np.min(loss)),
        "loss_spearman_model_logits": float(
            np.median([r[first]["loss_model_logits"]["spearman"] for r in results])
        ),
        "loss_ceiling": float(np.median([r[first]["loss_ceiling"] for r in results])),
        "weight_spearman": float(np.median(weight)),
        "weight_spearman_worst": float(np.min(weight)),
        "weight_ratio": float(
            np.median([r[first]["weight"][WEIGHT]["median_ratio"] for r in results])
        ),
        "weight_by_gemm": _by_gemm([r[first]["weight_by_gemm"] for r in results]),
        "weight_spearman_by_effort": {k: float(np.median(v)) for k, v in weights.items()},
        "loss_spearman_unseen": best[LOSS],
        "loss_spearman_unseen_by_score": best,
    }


def _by_gemm(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians over checkpoints of one GEMM's agreement and of predicted over measured."""
    return {
        gemm: {
            key: float(np.median([r[gemm][key] for r in results]))
            for key in ("spearman", "median_ratio")
        }
        for gemm in results[0]
    }


def _count_ticks(size: Size) -> int:
    layers = sum(4 * shape["num_layers"] for shape in size.shapes)
    return layers * len(size.checkpoints) * len(size.formats) * 5


def main(argv: list[str] | None = None) -> int:
    """Run, print a table, write JSON and a plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one shape, within 5 minutes")
    parser.add_argument("--bf16", action="store_true", help="BF16 compute instead of FP32")
    parser.add_argument(
        "--microbatches", type=int, metavar="N", help="of which truth and statistics are taken [2]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a scatter plot (PNG) here")
    args = parser.parse_args(argv)
    size = QUICK if args.quick else FULL
    size = replace(size, batches=args.microbatches or size.batches)
    console = Console(stderr=True)
    step = 0.3 if args.bf16 else 0.003
    snip = SnipConfig(formats=size.formats, probe_relative_step=step)
    results: list[dict[str, Any]] = []
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("brute force", total=_count_ticks(size))
        for shape in size.shapes:
            values = {**shape, "bf16": args.bf16, "train_iters": size.checkpoints[-1] + 64}
            with open_lab(values) as lab:
                for checkpoint in size.checkpoints:
                    lab.train(checkpoint - lab.step)
                    result = judge(lab, snip, size, lambda: progress.advance(task))
                    results.append({"shape": shape, **result})
                    summary = summarize(results, size.formats)
                    report = {"compute": "bf16" if args.bf16 else "fp32", **summary}
                    report |= {"microbatches": size.batches, "draws": size.draws}
                    if args.json:  # what is measured is kept, should the rest be interrupted
                        write_result(args.json, {**report, "checkpoints": results})
    _show(results, size, summary)
    if args.plot:
        _plot(results, size.formats, args.plot)
    return 0


def _show(results: list[dict[str, Any]], size: Size, summary: dict[str, Any]) -> None:
    console = Console(width=110)
    for kind in ("loss", "weight"):
        table = Table(
            title=f"{kind} divergence against brute force, Spearman", title_justify="left"
        )
        table.add_column("prediction")
        for result in results:
            table.add_column(f"L{result['shape']['num_layers']} step {result['step']}")
        for name in size.formats:
            for key in results[0][name][kind]:
                cells = [f"{r[name][kind][key]['spearman']:.2f}" for r in results]
                table.add_row(f"{name} {key}", *cells)
        console.print(table)
    for key in ("loss_spearman", "weight_spearman", "loss_spearman_unseen"):
        console.print(f"{key} {summary[key]:.3f}")


def _plot(results: list[dict[str, Any]], formats: tuple[str, ...], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5))
    for axis, kind in zip(axes, ("loss", "weight"), strict=True):
        for result in results:
            for name in formats:
                true, predicted = (np.array(v) for v in result[name]["points"][kind])
                label = f"L{result['shape']['num_layers']} step {result['step']} {name}"
                axis.scatter(true, predicted, s=14, alpha=0.7, label=label)
        if kind == "loss":
            axis.set_xscale("symlog", linthresh=1e-5)
            axis.set_yscale("symlog", linthresh=1e-5)
        else:
            axis.set_xscale("log")
            axis.set_yscale("log")
        axis.set_xlabel(f"measured {kind} change")
        axis.set_ylabel("predicted")
        axis.set_title(f"{kind} divergence, one linear at a time")
    axes[1].legend(fontsize=6)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
