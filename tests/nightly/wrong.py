"""A plugin whose policy misses the target, and calls its plan optimal."""

import numpy as np

from megatron_snip.planning.policies import POLICIES, Policy, Request
from megatron_snip.planning.search import Solution, assignment_of_most_gain


def _first_options(request: Request) -> Solution:
    columns = assignment_of_most_gain(request.constraints.checked_task())
    assert columns is not None
    return Solution(np.zeros_like(columns), "optimal", 0.0)


POLICIES["wrong"] = Policy("wrong", _first_options, needs_statistics=True, granularity="any")
