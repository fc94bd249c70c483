"""A plugin whose policy asks for more memory than the solver's process can have."""

import resource

from megatron_snip.planning.policies import POLICIES, Policy, Request
from megatron_snip.planning.search import Solution

MORE_BYTES = 1 << 28


def _take_memory(request: Request) -> Solution:
    with open("/proc/self/statm", encoding="ascii") as stream:
        taken = int(stream.read().split()[0]) * resource.getpagesize()
    limit = taken + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    parts = []
    while True:
        parts.append(bytearray(MORE_BYTES // 8))


POLICIES["hungry"] = Policy("hungry", _take_memory, needs_statistics=True, granularity="any")
