"""Policies against each other: branches from one warm model, and their table at one target."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.compare import analysis
from benchmarks.compare.runs import SETUPS, warm_model
from benchmarks.compare.store import ResultStore
from benchmarks.compare.variants import REPLAN, Formats, Plan, Planner, problems_of
from megatron_snip.options import BF16
from megatron_snip.planning.plan import assignment_digest

LOSSES = ("loss", "loss_bf16", "training_loss", "quarters", "tokens")
"""What a branch gives, the same for the same plan from the same warm model."""


def run_policies(store: ResultStore, options: argparse.Namespace, low: str, seed: int) -> None:
    """Make one branch a variant and target from one warm model; branches with a row are left out.

    A branch whose plan an earlier branch had, of any variant, gets the losses of that row.

    Raises:
        UsageError: if the rows of this seed started from another warm model.
    """
    place = {"kind": "policies", "setup": options.setup, "scenario": options.scenario}
    place |= {"seed": seed, "data_seed": 0}
    branches = [("bf16", 0.0), *((name, t) for t in options.targets for name in options.variants)]
    keys = [{**place, "low": low, "variant": name, "target": t} for name, t in branches]
    keys = [key for key in keys if not store.has(key)]
    if not keys:
        return
    formats, saved = Formats(low), None
    if options.checkpoints is not None:
        saved = options.checkpoints / f"{options.setup}-{seed}.pt"
    with warm_model(SETUPS[options.setup], seed, 1, options.scenario, saved) as warm:
        start = warm.digest
        store.check_start(place, start)
        table = warm.measure((formats.high, low))
        planner = Planner(problems_of(table, formats), formats, seed)
        bf16: Plan = {linear.name: BF16 for linear in table.linears}
        for key in keys:
            name, target = key["variant"], key["target"]
            plans = [bf16] if name == "bf16" else planner.plans(name, target)

            def remake(name: str = name, target: float = target) -> list[Plan]:
                table = warm.measure((formats.high, low))
                return Planner(problems_of(table, formats), formats, seed).plans(name, target)

            digest = None
            if len(plans) == 1 and name != REPLAN:
                digest = assignment_digest(plans[0])[:12]
            known = store.select({**place, "plan": digest}) if digest else []
            if known:
                result = {k: known[0][k] for k in LOSSES}
            else:
                result = warm.branch(plans, 0, remake if name == REPLAN else None)
            share = round(planner.share(plans[0]), 4)
            row = {**key, "start": start, "plan": digest, "share": share}
            store.add({**row, **_rounded(result)})


def _rounded(result: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in result.items()}


def policy_table(rows: list[dict[str, Any]]) -> str:
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
    head = ("variant", f"{rows[0]['low']} FLOPs", "gap", "gap, evaluated in BF16", "training gap")
    head = (*head, "over snip-gemm", "p")
    texts = [f"{pairs} seeds", analysis.markdown(head, lines)]
    if parts:
        head = ("training gap in quarter", "1", "2", "3", "4")
        texts.append(analysis.markdown(head, parts))
    return "\n\n".join(texts)
