"""Experts with static buffers (`--moe-expert-rank-capacity-factor`), in measured iterations.

Megatron gives the experts of a rank buffers of one size. If tokens do not fit, it repeats the pass
without that limit. In static buffers rows are left over that are no tokens. So a measured iteration
runs as the repeated pass does, and computes the same: where all tokens fit, nothing is dropped.

If Megatron repeats a pass all the same, what the first one has observed is forgotten.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_snip.patches.registry import Call, Session, patch

_MODULE = "megatron.core.transformer.moe.paged_stash"
_LIMIT = "moe_expert_rank_capacity_factor"


@patch(_MODULE, "PagedStashRunner.__call__", optional=True)
def measured_pass(call: Call, session: Session) -> Any:
    """Run a pass; without static buffers if it is observed."""
    if session.graphs is None or not session.graphs.is_measuring:
        return call.run()
    with _without_limit(call.arguments["self"]):
        return call.run()


@patch(_MODULE, "PagedStashRunner.prepare_for_rerun", optional=True)
def repeated_pass(call: Call, session: Session) -> Any:
    """Megatron drops what a pass did, and repeats it."""
    result = call.run()
    if session.graphs is not None:
        session.graphs.model.runtime.restart_pass()
    return result


@contextmanager
def _without_limit(runner: Any) -> Iterator[None]:
    """Let experts take all tokens, as `PagedStashRunner.prepare_for_rerun` does."""
    stashes = runner.config.moe_paged_stash
    senders = [getattr(moe.token_dispatcher, "_comm_manager", None) for moe in runner.moe_layers]
    limited = [(sender, getattr(sender, _LIMIT)) for sender in senders if hasattr(sender, _LIMIT)]
    for sender, _ in limited:
        setattr(sender, _LIMIT, None)
    runner._set_moe_paged_stash_all(False)
    try:
        yield
    finally:
        for sender, limit in limited:
            setattr(sender, _LIMIT, limit)
        runner._set_moe_paged_stash_all(stashes)
