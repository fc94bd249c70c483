"""Collectives of the control plane: JSON between ranks, and one decision for all.

Every function is called by all ranks of `group` in the same order and does nothing over the
network when `group` is None. Records travel as JSON bytes; nothing is pickled.
"""

import json
import logging
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_snip.errors import SnipError, UnsupportedError, UsageError, listing
from megatron_snip.log import log_failure

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_SHOWN = 3
"""Of different messages of failed ranks, and of ranks with the same one: large jobs have many."""


class RemoteFailure(SnipError):
    """At least one rank failed; every rank raises this with the same message."""

    def __init__(self, what: str, failures: Sequence[str | None]) -> None:
        """`failures` has every rank's message; None for a rank that did not fail."""
        ranks_by_text: dict[str, list[str]] = {}
        for rank, text in enumerate(failures):
            if text is not None:
                ranks_by_text.setdefault(text, []).append(str(rank))
        shown = [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {listing(ranks, MOST_SHOWN)}: {text}"
            for text, ranks in islice(ranks_by_text.items(), MOST_SHOWN)
        ]
        num_more = sum(map(len, islice(ranks_by_text.values(), MOST_SHOWN, None)))
        if num_more:
            shown.append(f"{num_more} more, see their logs")
        super().__init__(f"{what} failed on {'; '.join(shown)}")


def gather_json(value: Any, group: ProcessGroup | None) -> list[Any]:
    """All ranks: return every rank's `value`, in rank order.

    Raises:
        TypeError: if `value` is not JSON.
    """
    if group is None:
        return [json.loads(json.dumps(value))]
    payload = _encode(value)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([payload.numel()]), group=group)
    longest = int(max(length.item() for length in lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: payload.numel()] = payload
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return [
        _decode(part[: int(length.item())]) for part, length in zip(parts, lengths, strict=True)
    ]


def broadcast_json(value: Any, group: ProcessGroup | None) -> Any:
    """All ranks: return the `value` of the group's first rank (others pass anything).

    Raises:
        TypeError: on the first rank, if `value` is not JSON.
    """
    if group is None:
        return json.loads(json.dumps(value))
    source = dist.get_global_rank(group, 0)
    leader = dist.get_rank() == source
    payload = _encode(value) if leader else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([payload.numel()])
    dist.broadcast(length, src=source, group=group)
    if not leader:
        payload = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.broadcast(payload, src=source, group=group)
    return _decode(payload)


def attempt(what: str, action: Callable[[], T], group: ProcessGroup | None) -> T:
    """All ranks: run `action`, then agree: either every rank returns, or every rank raises.

    `action` must not itself communicate in a way that hangs when a peer raises.

    Raises:
        RemoteFailure: on every rank, if `action` raised an Exception on any.
    """
    result: T | None = None
    failure: str | None = None
    try:
        result = action()
    except Exception as error:  # any error must reach all ranks
        failure = log_failure(logger, what, error)
    if any_rank(failure is not None, group):
        raise RemoteFailure(what, gather_json(failure, group))
    return result  # type: ignore[return-value]  # no rank failed


def unless_refused(what: str, action: Callable[[], T], group: ProcessGroup | None) -> T:
    """All ranks: run `action`, which may refuse what this rank has; a refusal is every rank's.

    Pipeline stages and experts differ, so a model may be unsupported on some ranks alone.

    Raises:
        UnsupportedError: on every rank, if `action` raised one on any; it has the messages of all.
        RemoteFailure: on every rank, if `action` raised another Exception on any.
    """
    refusals: list[str] = []

    def outcome() -> T | None:
        try:
            return action()
        except UnsupportedError as error:
            refusals.extend(error.messages)
            return None

    result = attempt(what, outcome, group)
    of_all = dict.fromkeys(text for rank in gather_json(refusals, group) for text in rank)
    if of_all:
        raise UnsupportedError(*of_all)
    return result  # type: ignore[return-value]  # no rank refused


def on_rank_0(what: str, action: Callable[[], Any], group: ProcessGroup | None) -> Any:
    """All ranks: run `action` on the group's first rank; return its result, JSON, on every rank.

    Raises:
        UsageError: on every rank, if `action` raised one; it has the same message and field.
        RemoteFailure: on every rank, if `action` raised another Exception or its result is not
            JSON.
    """

    def outcome() -> dict[str, Any]:
        try:
            found = {"result": action()}
            json.dumps(found, allow_nan=False)  # what cannot be sent is an error here
            return found
        except UsageError as error:
            return {"message": error.message, "field": error.field}

    is_first = group is None or dist.get_rank(group) == 0
    own = attempt(what, outcome if is_first else dict, group)  # dict() is {}
    found = broadcast_json(own, group)
    if "message" in found:
        raise UsageError(found["message"], found["field"])
    return found["result"]


def sum_over(tensor: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """All ranks of `group`: add `tensor` up in place and return it; identity for None."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def sum_together(tensors: Sequence[torch.Tensor], group: ProcessGroup | None) -> list[torch.Tensor]:
    """All ranks of `group`: return the sum of each of the tensors over it, in one exchange."""
    flat = sum_over(torch.cat([tensor.reshape(-1) for tensor in tensors]), group)
    sums = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [total.view_as(tensor) for total, tensor in zip(sums, tensors, strict=True)]


def any_rank(flag: bool, group: ProcessGroup | None) -> bool:
    """All ranks of `group`: whether `flag` is set on any of them."""
    return int(sum_over(torch.tensor([int(flag)], dtype=torch.int32), group).item()) > 0


def _encode(value: Any) -> torch.Tensor:
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decode(payload: torch.Tensor) -> Any:
    return json.loads(payload.numpy().tobytes().decode())
