"""Thousands of random planning problems against enumeration, and hundreds against HiGHS.

    python -m tests.nightly.planner [--instances 10000] [--seed 0]

Instances cover every balance, pins, prices of changes, both cost models, forbidden options, ties,
zeros, negative losses and losses over 12 decades. Exit status 1 and the seeds of the failures if
the planner ever disagrees with a judge, returns a plan that the checker refuses, or proves a
bound above the optimum.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from megatron_snip.errors import InfeasiblePlanError
from megatron_snip.planning.checker import find_violations
from megatron_snip.planning.planner import make_plan
from tests.unit.planning.highs import highs_model
from tests.unit.planning.instances import Instance, random_instance
from tests.unit.planning.oracle import brute_force, num_changes

MEDIUM = (20, 60)
"""Numbers of linears of the instances that HiGHS judges."""

MEDIUM_SHARE = 0.03
"""How many instances are medium ones."""


def judge(instance: Instance, medium: bool) -> tuple[float | None, float]:
    """Return the optimum with the price of changes (None: infeasible), and its error."""
    problem, rules, previous = instance.problem, instance.settings, instance.previous
    if not medium:
        assignments = brute_force(problem, rules, previous)
        if assignments is None:
            return None, 0.0
        losses, changes = assignments
        return float((losses + rules.change_penalty * changes).min()), 0.0
    model = highs_model(problem, rules, previous)
    if model is None:
        return None, 0.0
    return model.solve(), 2e-6 * model.scale  # HiGHS's absolute tolerances


def complaint(instance: Instance, medium: bool) -> tuple[str, str]:
    """Return (what happened, what is wrong with it or "")."""
    problem, rules, previous = instance.problem, instance.settings, instance.previous
    wanted, tolerance = judge(instance, medium)
    try:
        plan = make_plan(problem, rules, previous)
    except InfeasiblePlanError as error:
        return "infeasible", "" if wanted is None else f"{error}, but {wanted} is feasible"
    if wanted is None:
        return plan.status, f"objective {plan.objective}, but the problem is infeasible"
    losses = [c.quality_loss or 0.0 for x in problem.linears for c in x.options.values()]
    tolerance += 1e-9 * (sum(map(abs, losses)) + rules.change_penalty * len(problem.linears))
    faults = find_violations(plan, problem, rules)
    paid = rules.change_penalty * num_changes(plan, problem, previous)
    if plan.objective + paid > wanted + tolerance:
        faults.append(f"objective {plan.objective + paid}, optimum {wanted}")
    if not medium and plan.objective + paid < wanted - tolerance:
        faults.append(f"objective {plan.objective + paid} below the optimum {wanted}")
    if plan.bound + paid > wanted + tolerance:
        faults.append(f"bound {plan.bound + paid} above the optimum {wanted}")
    if not medium and plan.status != "optimal":
        faults.append(f"status {plan.status} on a small problem")
    return plan.status, "; ".join(faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first instance")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    failures = 0
    start = time.monotonic()
    period = round(1 / MEDIUM_SHARE)
    for seed in range(args.seed, args.seed + args.instances):
        medium = seed % period == 0
        size = MEDIUM[seed // period % len(MEDIUM)] if medium else None
        status, wrong = complaint(random_instance(seed, num_linears=size), medium)
        counts[("medium " if medium else "") + status] += 1
        if wrong:
            failures += 1
            print(f"seed {seed}: {wrong}", flush=True)
    seconds = time.monotonic() - start
    print(f"{args.instances} instances in {seconds:.0f} s: {failures} failures; {dict(counts)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
