"""10,000 random planning problems against enumeration, and hundreds of them against HiGHS.

    python -m pytest tests/nightly/planner.py

Instances cover every balance, pins, prices of changes, both measures of efficiency, forbidden
options, ties, zeros, negative losses and losses over 12 decades.
"""

import pytest

from tests.unit.planning.instances import random_instance
from tests.unit.planning.optimality import check_against_enumeration, check_against_highs

MEDIUM = (20, 60)
"""Numbers of linears of the instances that HiGHS judges."""
MEDIUM_EVERY = 33


@pytest.mark.parametrize("chunk", range(100))
def test_plans_are_optimal(chunk: int) -> None:
    for seed in range(100 * chunk, 100 * (chunk + 1)):
        print("seed", seed)
        turn, rest = divmod(seed, MEDIUM_EVERY)
        if rest == 0:
            check_against_highs(random_instance(seed, num_linears=MEDIUM[turn % len(MEDIUM)]))
        else:
            check_against_enumeration(random_instance(seed))
