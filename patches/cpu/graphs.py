"""CUDA graphs on the CPU: a capture records torch's operations, and a replay runs them again.

A recorded operation reads and writes the same storages at every replay, as a captured kernel does,
and runs none of the Python around it. So a graph repeats what was decided while it was captured. A
program that should have captured again shows old numbers, as it would on a GPU.

A capture on a GPU runs nothing. Here operations must run to have results, so what they write to
tensors from before the capture, and the random numbers that they draw, are put back at its end.

What differs from a GPU: replayed random numbers come from the default generator, whatever stream
Megatron's tracker had forked in the capture; a collective is complete when its replay returns; and
sends and receives are complete before the next operation of another kind.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_READS = frozenset({torch.ops.aten._local_scalar_dense.default})
"""Operations that give a number to Python; a graph keeps the number of its capture."""

_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_WITHOUT_VALUES = {
    getattr(packet, overload)
    for packet in (getattr(torch.ops.aten, name) for name in _EMPTY)
    for overload in packet.overloads()
}
"""Operations whose result is memory alone."""

_POINT_TO_POINT = frozenset({torch.ops.c10d.send.default, torch.ops.c10d.recv_.default})

_capturing: "list[graph]" = []
"""The capture that runs in this process, if any."""

_pending: list[Any] = []
"""Sends and receives of this process that nobody has waited for."""


def is_capturing() -> bool:
    """Return whether a capture runs."""
    return bool(_capturing)


class CUDAGraph:
    """A recorded sequence of operations; see `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._steps: list[Callable[[], None]] | None = None

    def register_generator_state(self, state: Any) -> None:
        """Accept a generator; replays draw from the default one."""

    def pool(self) -> tuple[int, int]:
        """Return an identifier of the graph's memory."""
        return (0, id(self))

    def replay(self) -> None:
        """Run the recorded operations again.

        Raises:
            RuntimeError: if nothing was captured, or the graph was reset.
        """
        if self._steps is None:
            raise RuntimeError("called CUDAGraph::replay without a preceding successful capture")
        with torch.no_grad():
            for step in self._steps:
                step()
        _wait_for_pending()

    def reset(self) -> None:
        """Forget the capture and release its tensors."""
        self._steps = None


class graph(contextlib.AbstractContextManager["graph"]):
    """The context in which a graph is captured; see `torch.cuda.graph`."""

    def __init__(self, cuda_graph: CUDAGraph, *args: Any, **kwargs: Any) -> None:
        """Capture into `cuda_graph`; memory pool, stream and error mode have no meaning here."""
        self._graph = cuda_graph
        self._recorder = _Recorder()

    def __enter__(self) -> Self:
        """Begin the capture.

        Raises:
            RuntimeError: if another one runs.
        """
        if _capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        _capturing.append(self)
        self._random = torch.get_rng_state()
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the capture, and undo what it has written; an error leaves the graph empty."""
        self._recorder.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _capturing.remove(self)
        if error is None:
            _wait_for_pending()
        _pending.clear()
        self._recorder.undo_writes()
        torch.set_rng_state(self._random)
        if error is None:
            self._graph._steps = self._recorder.steps


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations and records them; `steps` runs them again, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], None]] = []
        self._kept: list[Any] = []
        self._own: set[int] = set()  # addresses of storages that the capture has made
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation; a tensor subclass is asked first for the operations that it makes."""
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        self._save_before_write(func, args, kwargs)
        result = _run(func, args, kwargs)
        if func not in _READS:
            self._record(func, args, kwargs, result)
        return result

    def undo_writes(self) -> None:
        """Put back what was in storages that the capture has written but not made."""
        with torch.no_grad():
            for storage, value in self._before.values():
                storage.copy_(value)

    def _save_before_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in _written(func, args, kwargs):
            address = _address(tensor)
            if address not in self._own and address not in self._before:
                everything = torch.empty(0, dtype=torch.uint8)
                everything.set_(tensor.untyped_storage())
                self._before[address] = (everything, everything.clone())

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        given = {_address(t) for t in _tensors((args, kwargs))}
        made = [t for t in _tensors(result) if _address(t) not in given]
        self._own.update(_address(t) for t in made)
        outputs = _aliases(result)
        if func in _WITHOUT_VALUES:
            self._kept.append(outputs)
            return
        call = (func, _aliases(args), _aliases(kwargs))
        self.steps.append(lambda: _run_again(*call, outputs, given))


def _run_again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, given: set[int]
) -> None:
    """Run an operation on its recorded arguments; write what it returns where it was recorded."""
    result = _run(func, args, kwargs)
    for old, new in zip(tree_leaves(outputs), tree_leaves(result), strict=True):
        if isinstance(old, torch.Tensor) and _address(old) not in given:
            old.copy_(new)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation; a collective is complete when it returns.

    Sends and receives are not: two pipeline stages may each send before they receive.
    """
    if func in _POINT_TO_POINT:
        _pending.append(func(*args, **kwargs))
        return FakeWork().boxed()
    _wait_for_pending()
    return tree_map(_finished, func(*args, **kwargs))


def _wait_for_pending() -> None:
    while _pending:
        _pending.pop(0).wait()


def _finished(leaf: Any) -> Any:
    """Wait for a collective here: gloo copies its results in `wait`, and none may be recorded."""
    if not isinstance(leaf, torch.ScriptObject):
        return leaf
    leaf.wait()  # type: ignore[attr-defined]
    return FakeWork().boxed()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes into; of a collective, all that it is given."""
    if func.namespace == "c10d":
        yield from _tensors((args, kwargs))
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _aliases(tree: Any) -> Any:
    """Return the same tensors without their autograd history and version counters."""
    return tree_map(lambda leaf: leaf.data if isinstance(leaf, torch.Tensor) else leaf, tree)


def _address(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor while it is alive."""
    return int(tensor.untyped_storage()._cdata)
