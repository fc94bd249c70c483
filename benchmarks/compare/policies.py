"""Policies against each other: branches from one warm model, and their table at one target."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare import analysis
from benchmarks.compare.runs import SETUPS, WarmModel, warm_model
from benchmarks.compare.store import ResultStore
from benchmarks.compare.variants import REPLANNED, Formats, Plan, Planner, problems_of
from megatron_snip.planning.plan import assignment_digest

LOSSES = ("loss", "loss_bf16", "training_loss", "quarters", "tokens")
"""What a branch gives, the same for the same plan from the same warm model."""


def run_policies(store: ResultStore, options: argparse.Namespace, low: str, seed: int) -> None:
    """Make one branch a variant and target from one warm model; branches with a row are left out.

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
    with warm_model(
        SETUPS[options.setup], seed, 1, options.scenario, saved_model(options, options.setup, seed)
    ) as warm:
        store.check_start(place, warm.digest)
        run_branches(store, warm, keys)


def saved_model(options: argparse.Namespace, setup: str, seed: int) -> Path | None:
    """Return where a warm model is kept; None without --checkpoints."""
    return options.checkpoints and options.checkpoints / f"{setup}-{seed}.pt"


def run_branches(
    store: ResultStore,
    warm: WarmModel,
    keys: Sequence[Mapping[str, Any]],
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Make a branch for each key, all of one setup, scenario and seed.

    A branch whose plan an earlier branch had, of any variant, gets the losses of that row, which
    `equal_to` names.

    Args:
        store: gets the rows.
        warm: the model.
        keys: of the rows.
        goes_on: asked before each branch.
    """
    start = warm.digest

    def new_planner(low: str, seed: int) -> Planner:
        formats = Formats(low)
        return Planner(problems_of(warm.measure((formats.high, low)), formats), formats, seed)

    # All before the first branch: a branch changes the weights.
    planners = {
        low: new_planner(low, key["seed"]) for low, key in {k["low"]: k for k in keys}.items()
    }
    for key in keys:
        if not goes_on():
            return
        name = key["variant"]
        target = key["target"]
        planner = planners[key["low"]]
        plans = planner.plans(name, target)
        row: dict[str, Any] = {**key, "start": start, "plan": None}
        row["share"] = round(planner.share(plans[0]), 4)
        if name in REPLANNED:
            made: list[Plan] = []

            def remake(key: Mapping[str, Any] = key, made: list[Plan] = made) -> list[Plan]:
                made += new_planner(key["low"], key["seed"]).plans(key["variant"], key["target"])
                return made

            result = warm.branch(plans, 0, remake)
            row["plans"] = [_digest(plan) for plan in (*plans, *made)]
        elif len(plans) > 1:
            result = warm.branch(plans, 0)
        else:
            row["plan"] = _digest(plans[0])
            place = {k: key[k] for k in ("kind", "setup", "scenario", "seed", "data_seed")}
            known = store.select({**place, "start": start, "plan": row["plan"]})
            if known:
                result = {k: known[0][k] for k in LOSSES}
                row["equal_to"] = [known[0][k] for k in ("low", "variant", "target")]
            else:
                result = warm.branch(plans, 0)
        store.add({**row, **_rounded(result)})


def _digest(plan: Plan) -> str:
    return assignment_digest(plan)[:12]


def _rounded(result: dict[str, Any]) -> dict[str, Any]:
    """Round what a branch gave; a number that is not finite becomes None."""

    def rounded(value: Any) -> Any:
        if not isinstance(value, float):
            return value
        return round(value, 6) if math.isfinite(value) else None

    return {name: rounded(value) for name, value in result.items()}


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
