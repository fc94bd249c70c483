"""Who makes the plan: one registry, one interface, one budget arithmetic.

Adding a policy is a file that satisfies `policy.Policy`, a line in `POLICIES` and a test.
"""

from __future__ import annotations

from megatron_snip.errors import UsageError, did_you_mean
from megatron_snip.planning.policies.fixed import NonePolicy, UniformPolicy
from megatron_snip.planning.policies.greedy import GreedyPolicy
from megatron_snip.planning.policies.ordered import (
    OrderedPolicy,
    error_order,
    layer_id_order,
    layer_type_order,
    random_order,
)
from megatron_snip.planning.policies.policy import Decision, Metrics, Policy, Request
from megatron_snip.planning.policies.snip import SnipPolicy

UNIFORM = "uniform-"
"""Prefix of the policies that give every linear one option."""

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        SnipPolicy(),
        OrderedPolicy("random", random_order),
        OrderedPolicy("min-abs-err", error_order("min-abs-err", "abs_error")),
        OrderedPolicy("min-rel-err", error_order("min-rel-err", "rel_error")),
        OrderedPolicy("layer-type", layer_type_order),
        OrderedPolicy("layer-id", layer_id_order),
        GreedyPolicy(),
        NonePolicy(),
    )
}
"""Every policy by name, but for the uniform ones, which are made from their option."""


def policy_names() -> tuple[str, ...]:
    """Return what may be asked for, as help texts list it."""
    return (*POLICIES, f"{UNIFORM}OPTION")


def get_policy(name: str) -> Policy:
    """Return the policy called `name`.

    Raises:
        UsageError: if there is none; the message lists those there are.
    """
    if name.startswith(UNIFORM) and len(name) > len(UNIFORM):
        return UniformPolicy(name.removeprefix(UNIFORM))
    try:
        return POLICIES[name]
    except KeyError:
        hint, known = did_you_mean(name, POLICIES), ", ".join(policy_names())
        raise UsageError(f"unknown policy '{name}'{hint}; known: {known}") from None


__all__ = ["POLICIES", "Decision", "Metrics", "Policy", "Request", "get_policy", "policy_names"]
