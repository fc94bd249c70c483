"""Policies against each other: branches from one warm model, and their table at one target."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.compare import analysis
from benchmarks.compare.runs import SETUPS, WarmModel, warm_model
from benchmarks.compare.store import ResultStore
from benchmarks.compare.variants import AT_TAG, TAG, Formats, Planner, problems_of
from megatron_snip.errors import UsageError
from megatron_snip.planning.plan import assignment_digest

LOSSES = ("loss", "loss_bf16", "training_loss", "quarters", "tokens")
"""What a branch gives, the same for the same plan from the same warm model."""


def run_policies(store: ResultStore, options: argparse.Namespace, low: str, seed: int) -> None:
    """Make one branch a variant and target from one warm model; branches with a row are left out.

    Raises:
        UsageError: if a variant is made at TAG alone, or the rows of this seed started from another
            warm model.
    """
    place = {"kind": "policies", "setup": options.setup, "scenario": options.scenario}
    place |= {"seed": seed, "data_seed": 0}
    branches = [("bf16", 0.0), *((name, t) for t in options.targets for name in options.variants)]
    keys = [{**place, "low": low, "variant": name, "target": t} for name, t in branches]
    keys = [key for key in keys if not store.has(key)]
    if not keys:
        return
    for key in keys:
        if key["variant"] in AT_TAG:
            raise UsageError(
                f"plans of {key['variant']} are made from measured products, which are gone: check "
                f"out the tag {TAG}, or give --variants norms-q-gemm,norms-q-linear"
            )
    with warm_model(SETUPS[options.setup], seed, options.scenario) as warm:
        store.check_start(place, warm.digest)
        run_branches(store, warm, keys)


def run_branches(store: ResultStore, warm: WarmModel, keys: Sequence[Mapping[str, Any]]) -> None:
    """Make a branch for each key, all of one setup, scenario, format and seed.

    A branch whose plan an earlier branch had, of any variant, gets the losses of that row, which
    `equal_to` names.
    """
    start = warm.digest
    formats = Formats(keys[0]["low"])
    # Before the first branch: a branch changes the weights.
    problems = problems_of(warm.measure((formats.high, formats.low)), formats)
    planner = Planner(problems, formats, keys[0]["seed"])
    for key in keys:
        plan = planner.plan(key["variant"], key["target"])
        digest = assignment_digest(plan)[:12]
        row = {**key, "start": start, "plan": digest, "share": round(planner.share(plan), 4)}
        place = {k: key[k] for k in ("kind", "setup", "scenario", "seed", "data_seed")}
        known = store.select({**place, "start": start, "plan": digest})
        if known:
            result = {k: known[0][k] for k in LOSSES}
            row["equal_to"] = [known[0][k] for k in ("low", "variant", "target")]
        else:
            result = warm.branch(plan)
        store.add({**row, **result})


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
