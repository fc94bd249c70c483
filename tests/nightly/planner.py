"""Thousands of random planning problems against enumeration, and hundreds against HiGHS.

    python -m tests.nightly.planner [--instances 10000] [--seed 0]

The checks are those of tests/unit/planning/test_planner.py. Instances cover every balance, pins,
prices of changes, both cost models, forbidden options, ties, zeros, negative losses and losses over
12 decades. Exit status 1 and the seeds of the failures if the planner ever disagrees with a judge,
returns a plan that the checker refuses, or proves a bound above the optimum.
"""

import argparse
import sys
import time
import traceback

import pytest

from megatron_snip.errors import SnipError
from tests.unit.planning.instances import random_instance
from tests.unit.planning.test_planner import check_against_enumeration, check_against_highs

MEDIUM = (20, 60)
"""Numbers of linears of the instances that HiGHS judges."""

MEDIUM_EVERY = 33


def complaint(seed: int) -> str:
    """Return what is wrong with the plan of an instance, or ""."""
    turn, rest = divmod(seed, MEDIUM_EVERY)
    try:
        if rest == 0:
            check_against_highs(random_instance(seed, num_linears=MEDIUM[turn % len(MEDIUM)]))
        else:
            check_against_enumeration(random_instance(seed))
    except (AssertionError, SnipError, pytest.fail.Exception):
        return traceback.format_exc(limit=-1)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first instance")
    args = parser.parse_args()
    failures = 0
    start = time.monotonic()
    for seed in range(args.seed, args.seed + args.instances):
        if wrong := complaint(seed):
            failures += 1
            print(f"seed {seed}: {wrong}", flush=True)
    seconds = time.monotonic() - start
    print(f"{args.instances} instances in {seconds:.0f} s: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
