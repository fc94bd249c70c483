"""Train policies against each other, or estimate what each GEMM costs; print the tables.

    python -m benchmarks.compare policies [--formats fp3,fp4] [--seeds 6] [--variants A,B,...]
    python -m benchmarks.compare forks [--formats fp3,fp4] [--pairs 48] [--data-seeds 2]
    python -m benchmarks.compare table [--figure FILE.svg]
    (each with --setup quick, which takes ten minutes, --scenario outliers, --results FILE)

`policies`: from a BF16 warm-up of each seed, one branch a variant; all plans have equal shares of
FLOPs in the low format. `forks`: from one warm-up, branches with a random half of all GEMMs in the
low format, in complementary pairs; a regression gives each GEMM's cost. A branch is a row of
benchmarks/results/compare.jsonl. A row that exists is not made again, so a command resumes where it
was stopped, and more seeds add rows.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from benchmarks.compare import analysis
from benchmarks.compare.runs import SCENARIOS, SETUPS, WarmModel, warm_model
from benchmarks.compare.variants import (
    REPLAN,
    RULES,
    Formats,
    Item,
    Plan,
    items_of,
    low_items,
    make_plans,
    plan_of,
    share_of,
    snip_costs,
)
from benchmarks.machine import RESULTS, append_row, read_rows
from megatron_snip.divergence.quality_loss import absolute_error, norm_bound, relative_error
from megatron_snip.options import Option
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.types import Gemm

VARIANTS = ("snip-gemm", "snip-linear", *RULES)
TARGET, HIGH = 0.75, "fp8"
FORK_TARGET = 0.5
KEY = ("kind", "setup", "scenario", "low", "seed", "data_seed", "variant")


class ResultStore:
    """Rows of a JSON-lines file; each is found by its key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = read_rows(path)

    def has(self, key: Mapping[str, Any]) -> bool:
        """Return whether there is a row with this key."""
        return any(all(row[k] == key[k] for k in KEY) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and print it."""
        self.rows.append(append_row(self._path, row))
        shown = " ".join(str(row[k]) for k in KEY)
        print(f"{shown}: {row['loss']:.4f}", flush=True)


def main() -> None:
    """Run the command line."""
    options = _arguments()
    store = ResultStore(options.results)
    if options.command == "policies":
        for low in options.formats:
            for seed in range(options.seeds):
                run_policies(store, options, low, seed)
    elif options.command == "forks":
        run_forks(store, options)
    print(tables(store.rows, options.results))
    if options.figure:
        wanted = {"kind": "policies", "setup": options.setup, "scenario": options.scenario}
        rows = [row for row in store.rows if wanted.items() <= row.items()]
        draw_gaps(rows, options.figure)


def run_policies(store: ResultStore, options: argparse.Namespace, low: str, seed: int) -> None:
    """Make one branch a variant from one warm-up; branches that have a row are left out."""
    setup, formats = SETUPS[options.setup], Formats(low, HIGH, TARGET)
    key = {"kind": "policies", "setup": options.setup, "scenario": options.scenario}
    key |= {"low": low, "seed": seed, "data_seed": 0}
    names = [n for n in ("bf16", *options.variants) if not store.has({**key, "variant": n})]
    if not names:
        return
    with warm_model(setup, seed, 1, options.scenario) as warm:
        table = warm.measure((HIGH, low))
        plans = make_plans(table, formats, seed, [n for n in names if n != "bf16"])
        for name in names:
            branch = plans.get(name, [None])
            share = share_of(low_items(branch[0] or {}, formats), table.linears)

            def remake(name: str = name) -> list[Plan]:
                return make_plans(warm.measure((HIGH, low)), formats, seed, [name])[name]

            result = warm.branch(branch, 0, remake if name == REPLAN else None)
            store.add({**key, "variant": name, "share": round(share, 4), **_rounded(result)})


def run_forks(store: ResultStore, options: argparse.Namespace) -> None:
    """Make branches with complementary random halves of the GEMMs in the low format."""
    setup = SETUPS[options.setup]
    with warm_model(setup, 0, options.data_seeds, options.scenario) as warm:
        for low in options.formats:
            table = warm.measure((HIGH, low))
            _write_scores(options, low, table)
            for data_seed in range(options.data_seeds):
                _run_pairs(store, options, warm, table, low, data_seed)


def _run_pairs(
    store: ResultStore,
    options: argparse.Namespace,
    warm: WarmModel,
    table: StatisticsTable,
    low: str,
    data_seed: int,
) -> None:
    key = {"kind": "forks", "setup": options.setup, "scenario": options.scenario}
    key |= {"low": low, "seed": 0, "data_seed": data_seed}
    first = 1000 * data_seed
    pairs = range(first, first + options.pairs)
    for name, plan in _fork_plans(table, Formats(low, HIGH, FORK_TARGET), pairs):
        if not store.has({**key, "variant": name}):
            loss = warm.branch([plan], data_seed)["loss"]
            store.add({**key, "variant": name, "loss": round(loss, 6)})


def _fork_plans(
    table: StatisticsTable, formats: Formats, pairs: range
) -> Iterator[tuple[str, Plan | None]]:
    """Return the BF16 branch and both halves of each pair; no two data seeds share a pair."""
    yield "bf16", None
    items = items_of(table.linears)
    for k in pairs:
        for half, low in enumerate(_halves(items, k)):
            yield f"{k}-{half}", plan_of(low, table.linears, formats)


def _halves(items: list[Item], pair: int) -> tuple[set[Item], set[Item]]:
    order = np.random.default_rng(pair).permutation(len(items))
    first = {items[i] for i in order[: len(items) // 2]}
    return first, set(items) - first


def _write_scores(options: argparse.Namespace, low: str, table: StatisticsTable) -> None:
    """Write every score of the items, before any branch is made."""
    linears = {s.name: s for s in table.linears}
    items = items_of(table.linears)
    snip = snip_costs(table, Formats(low, HIGH, TARGET))
    alone = {g: Option(*(low if g == k else "bf16" for k in Gemm)) for g in Gemm}
    distance = (max(int(n.split(".")[2]) for n in linears)) / 2
    scores = {
        "snip": [snip[item] for item in items],
        "norms": [norm_bound(linears[n], alone[g]) for n, g in items],
        "min-abs-err": [absolute_error(linears[n], alone[g]) for n, g in items],
        "min-rel-err": [relative_error(linears[n], alone[g]) for n, g in items],
        "fprop only": [float(g == Gemm.FPROP) for _, g in items],
        "grads-first": [
            (g == Gemm.FPROP) * (1 + abs(int(n.split(".")[2]) - distance)) for n, g in items
        ],
    }
    value = {
        "items": [f"{name}:{gemm.name.lower()}" for name, gemm in items],
        "flops": [linears[name].flops_per_token / 3 for name, _ in items],
        "scores": {k: [float(f"{v:.4g}") for v in values] for k, values in scores.items()},
    }
    path = _scores_path(options.results, options.setup, options.scenario, low)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value) + "\n")


def _scores_path(results: Path, setup: str, scenario: str, low: str) -> Path:
    return results.with_name(f"{results.stem}-scores-{setup}-{scenario}-{low}.json")


def tables(rows: list[dict[str, Any]], results: Path) -> str:
    """Return all tables of the rows as Markdown; the scores of forks lie beside `results`."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in KEY[:4]), []).append(row)
    return "\n\n".join(
        policy_table(group, name) if name[0] == "policies" else fork_table(group, name, results)
        for name, group in sorted(groups.items())
    )


def policy_table(rows: list[dict[str, Any]], name: tuple[str, ...]) -> str:
    """Return gaps to BF16 and to snip-gemm, best first."""
    found, bf16 = analysis.gaps(rows), analysis.gaps(rows, "loss_bf16")
    training = analysis.gaps(rows, "training_loss")
    share = {
        variant: float(np.mean([row["share"] for row in rows if row["variant"] == variant]))
        for variant in found
    }
    lines = []
    for variant in sorted(found, key=lambda v: float(np.mean(list(found[v].values())))):
        against = analysis.paired(found[variant], found.get("snip-gemm", {}))
        same = variant == "snip-gemm" or not against
        lines.append(
            (
                variant,
                f"{100 * share[variant]:.1f} %",
                str(analysis.mean_of(list(found[variant].values()))),
                str(analysis.mean_of(list(bf16[variant].values()))),
                str(analysis.mean_of(list(training[variant].values()))),
                "" if same else str(analysis.mean_of(against)),
                "" if same else analysis.p_text(against),
            )
        )
    quarters = [row for row in rows if "quarters" in row]
    over_time = [
        analysis.gaps([{**row, "part": row["quarters"][k]} for row in quarters], "part")
        for k in range(4)
    ]
    parts = [
        (name, *(str(analysis.mean_of(list(part[name].values()))) for part in over_time))
        for name in over_time[0]
    ]
    pairs = max(len(values) for values in found.values()) if found else 0
    head = ("variant", f"{name[3]} FLOPs", "gap", "gap, evaluated in BF16", "training gap")
    head = (*head, "over snip-gemm", "p")
    texts = [f"### {' '.join(name)}, {pairs} seeds", analysis.markdown(head, lines)]
    if parts:
        head = ("training gap in quarter", "1", "2", "3", "4")
        texts.append(analysis.markdown(head, parts))
    return "\n\n".join(texts)


def draw_gaps(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw each variant's gap to BF16 with its 95 % interval, a panel for each format.

    Args:
        rows: of `policies`, of one setup and scenario.
        path: of the picture; its ending gives the type.
    """
    formats = sorted({row["low"] for row in rows})
    figure = Figure(figsize=(6 * len(formats), 4), layout="constrained")
    panels = figure.subplots(1, len(formats), squeeze=False)[0]
    for panel, low in zip(panels, formats, strict=True):
        gaps = analysis.gaps(row for row in rows if row["low"] == low)
        found = {variant: list(values.values()) for variant, values in gaps.items()}
        order = sorted(found, key=lambda v: -float(np.mean(found[v])))
        for k, variant in enumerate(order):
            mean = analysis.mean_of(found[variant])
            panel.plot(found[variant], [k] * len(found[variant]), "o", ms=3, color="0.7")
            panel.errorbar(mean.mean, k, xerr=mean.half, fmt="o", color="C0", capsize=3)
        panel.set_yticks(range(len(order)), order)
        panel.set_title(low)
        panel.set_xlabel("held-out loss over BF16 (1e-3 nat)")
        panel.grid(axis="x", alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def fork_table(rows: list[dict[str, Any]], name: tuple[str, ...], results: Path) -> str:
    """Return the costs of GEMMs by kind, the rank correlation of scores, and plan regrets."""
    _, setup, scenario, low = name
    path = _scores_path(results, setup, scenario, low)
    known = json.loads(path.read_text())
    items, flops = known["items"], np.array(known["flops"])
    found = analysis.gaps(rows)
    pairs = [(variant, pair) for variant, values in found.items() for pair in values]
    pairs.sort(key=lambda run: (run[1][1], *map(int, run[0].split("-"))))  # complements adjoin
    if len(pairs) < 2 * len(items):  # a pair of complements gives one equation
        return f"### {' '.join(name)}: {len(pairs)} runs, too few for {len(items)} GEMMs"
    split: list[Item] = [(i.rsplit(":", 1)[0], Gemm[i.rsplit(":", 1)[1].upper()]) for i in items]
    design = np.zeros((len(pairs), len(items)))
    for row, (variant, _) in enumerate(pairs):
        k, half = map(int, variant.split("-"))
        low_half = _halves(split, k)[half]
        design[row] = [item in low_half for item in split]
    gap = np.array([found[variant][pair] for variant, pair in pairs])
    costs = analysis.regress(design, gap, np.array([pair[1] for _, pair in pairs]))
    by_gemm = {
        gemm.name.lower(): [c for c, (_, g) in zip(costs.cost, split, strict=True) if g == gemm]
        for gemm in Gemm
    }
    kinds = [(g, f"{np.sum(c):+.1f}", f"{np.max(c):+.2f}") for g, c in by_gemm.items()]
    best = costs.cost[analysis.best_items(costs.cost, flops, TARGET)].sum()
    fprop = np.array([gemm == Gemm.FPROP for _, gemm in split])
    snip = analysis.best_items(np.array(known["scores"]["snip"]), flops, TARGET)
    lines = []
    for score, values in known["scores"].items():
        low_set = analysis.best_items(np.array(values), flops, TARGET)
        rho = spearmanr(values, costs.cost).statistic
        among = spearmanr(np.array(values)[fprop], costs.cost[fprop]).statistic
        change = low_set.astype(float) - snip
        error = float(np.sqrt(change @ costs.covariance @ change))
        over = f"{change @ costs.cost:+.1f} ± {error:.1f}" if error else ""
        regret = f"{costs.cost[low_set].sum() - best:+.1f}"
        lines.append((score, f"{rho:.2f}", f"{among:.2f}", regret, over))
    gemms = np.array([gemm for _, gemm in split])
    alike = np.array([costs.cost[gemms == gemm].mean() for gemm in gemms])
    regret = analysis.best_plan_regret(costs, np.where(fprop, costs.cost, alike), flops, TARGET)
    return "\n\n".join(
        (
            f"### {' '.join(name)}, {len(pairs)} runs",
            "Standard error of a GEMM's cost "
            f"{np.sqrt(np.diag(costs.covariance)).mean():.2f}; residual {costs.residual:.2f}; "
            f"held-out share of variance explained {costs.additivity:.2f}.",
            analysis.markdown(("GEMM", "cost of all", "largest cost of one"), kinds),
            analysis.markdown(
                (
                    "score",
                    "Spearman with the cost",
                    "within fprop",
                    "regret of its plan",
                    "over snip",
                ),
                lines,
            ),
            "If all dgrad cost the same and all wgrad too, the best plan would have a regret of "
            f"{regret[0]:.1f} ± {regret[1]:.1f} (standard deviation) in costs with these errors.",
        )
    )


def _rounded(result: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in result.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("policies", "forks", "table"))
    parser.add_argument("--setup", choices=SETUPS, default="small")
    parser.add_argument("--scenario", choices=SCENARIOS, default="plain")
    parser.add_argument("--formats", type=_names, default=("fp3", "fp4"))
    parser.add_argument("--seeds", type=int, default=6, help="checkpoints of `policies`")
    parser.add_argument("--variants", type=_names, default=VARIANTS)
    parser.add_argument(
        "--pairs", type=int, default=48, help="complementary pairs of `forks` for each data seed"
    )
    parser.add_argument("--data-seeds", type=int, default=2, help="continuations of `forks`")
    parser.add_argument("--results", type=Path, default=RESULTS / "compare.jsonl")
    parser.add_argument("--figure", type=Path, help="draw the gaps of a scenario here")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    main()
