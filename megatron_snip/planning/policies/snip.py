"""snip: the integer program of the paper, solved to a proven bound."""

from __future__ import annotations

from megatron_snip.planning.plan import Status
from megatron_snip.planning.policies.policy import Decision, Request
from megatron_snip.planning.solve import solve


class SnipPolicy:
    """Minimizes the sum of quality losses under all rules."""

    name = "snip"
    wants_bf16 = False
    minimizes_loss = True
    heeds_target = True

    def decide(self, request: Request) -> Decision:
        """Solve; see `Policy`."""
        task = request.rules.checked_task()
        found = solve(task, request.settings, request.hint, request.deadline)
        status: Status = "optimal" if found.optimal else "feasible"
        return Decision(found.columns, status, found.bound, task, found.error)
