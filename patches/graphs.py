"""CUDA graphs under SNIP: what must be eager runs without them, and a new plan is captured again.

A captured graph repeats the kernels of its capture: no Python runs, so no observer sees a tensor
and no linear reads its plan.

    measured iteration     runs without graphs; graphs and Megatron's counters stay as they are
    full iteration         a new plan drops the graph; Megatron warms up and captures again
    per layer              the first iteration of a new plan runs without graphs. Before the next
    (Transformer Engine)   one Megatron captures again, if the option of a captured linear changed

All ranks see the same plan, so they decide alike. The log says how long each capture took.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_snip.log import warn_once_per_job
from megatron_snip.patches.registry import Call, Session, patch

if TYPE_CHECKING:  # they import Megatron
    from megatron_snip.linears.model import PlannedModel
    from megatron_snip.linears.planned_linear import PlannedLinear

logger = logging.getLogger(__name__)

_GRAPHS = "megatron.core.transformer.cuda_graphs"


@patch("megatron.core.full_cuda_graph", "FullCudaGraphWrapper.__call__", optional=True)
def full_iteration(call: Call, session: Session) -> Any:
    """Run a step of training or validation, as a graph or without one."""
    if session.graphs is None:
        return call.run()
    wrapper = call.arguments["self"]
    kwargs = call.arguments["kwargs"]
    controller = session.controller
    repeats = controller is not None and controller.evaluations.repeats_microbatches
    if repeats and session.evaluating is not None and kwargs["forward_only"]:
        # One graph holds one precision, and this evaluation runs in several.
        text = "snip: evaluations run without CUDA graphs: each runs in several precisions"
        warn_once_per_job(logger, text, logging.INFO)
        return wrapper.forward_backward_func(**kwargs)
    return session.graphs.run_full_iteration(wrapper, kwargs, call.run)


@patch(_GRAPHS, "TECudaGraphHelper.__init__", needs=("model",), optional=True)
def helper_setup(call: Call, session: Session) -> None:
    """Remember what captures the layers, and how it was made: each capture needs a new one."""
    call.run()
    helper = call.arguments["self"]
    if _is_of_an_encoder(helper):
        return
    session.graph_helpers[helper] = {k: v for k, v in call.arguments.items() if k != "self"}


@patch(_GRAPHS, "TECudaGraphHelper.create_cudagraphs", optional=True)
def layer_capture(call: Call, session: Session) -> Any:
    """Capture the layers, and note which linears were captured."""
    helper = call.arguments["self"]
    if session.graphs is None or _is_of_an_encoder(helper):
        return call.run()
    return session.graphs.capture(helper, call.run)


@patch(_GRAPHS, "TECudaGraphHelper.delete_cuda_graphs", optional=True)
def layer_deletion(call: Call, session: Session) -> Any:
    """Delete the layers' graphs, which Megatron does at the end of training."""
    if session.graphs is not None:
        session.graphs.forget(call.arguments["self"])
    return call.run()


def _is_of_an_encoder(helper: Any) -> bool:
    """Return whether a helper captures layers of a vision encoder, which no plan changes.

    Only the ranks that have the encoder make one, so nothing may be gathered over ranks then.
    """
    from megatron.core.transformer import cuda_graphs

    encoder_helper = getattr(cuda_graphs, "VisionTECudaGraphHelper", None)
    return encoder_helper is not None and isinstance(helper, encoder_helper)


PATCHES = (full_iteration, helper_setup, layer_capture, layer_deletion)


@dataclass
class Graphs:
    """The CUDA graphs of a training run, and the plan under which each was captured.

    Attributes:
        model: whose linears they run.
        was_slow: a step since this was last cleared captured a graph, or ran without one that it
            usually has; its seconds say nothing about the plan.
    """

    model: PlannedModel
    was_slow: bool = False
    # Of a full iteration, by stage: (how often options had changed, what ran in BF16).
    _captured_plan: dict[str, tuple[int, frozenset[str] | None]] = field(default_factory=dict)
    # Of layers, by TECudaGraphHelper: captured linear -> how often its option had changed.
    _captured_linears: dict[Any, dict[str, int]] = field(default_factory=dict)
    # Class of captured layers -> the `__call__` that it itself defined before, or None.
    _calls: dict[type, Any] = field(default_factory=dict)

    @property
    def is_measuring(self) -> bool:
        """Whether the iteration that runs is observed."""
        return self.model.runtime.observer is not None

    def run_full_iteration(self, wrapper: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """All ranks: run a step through Megatron's `FullCudaGraphWrapper`.

        Args:
            wrapper: Megatron's wrapper; its graphs are attributes of the class.
            kwargs: keyword arguments of the forward-backward function that it wraps.
            run: lets the wrapper run: eagerly while it warms up, then as a graph.
        """
        stage = "validation" if kwargs["forward_only"] else "training"
        if self.is_measuring:
            if wrapper.cuda_graph.get(stage) is not None:
                self._gather_parameters_again()
            return wrapper.forward_backward_func(**kwargs)
        plan = (self.model.changes.total(), self.model.runtime.in_bf16)
        if wrapper.cuda_graph.get(stage) is not None and self._captured_plan.get(stage) != plan:
            _reset(wrapper, stage)
            self._log(f"the graph of the {stage} step is dropped: the plan has changed")
        was_captured = wrapper.cuda_graph.get(stage) is not None
        if not was_captured and stage in self._captured_plan:
            # It warms up and is captured again, perhaps right after an evaluation. A graph that is
            # captured without the gather would keep the parameters of that evaluation.
            self._gather_parameters_again()
        begin = time.perf_counter()
        results = run()
        self.was_slow |= not was_captured
        if wrapper.cuda_graph.get(stage) is not None and not was_captured:
            self._captured_plan[stage] = plan
            seconds = time.perf_counter() - begin
            self._log(f"captured the {stage} step as a CUDA graph in {seconds:.3g} s")
        return results

    def capture(self, helper: Any, run: Callable[[], Any]) -> Any:
        """All ranks: capture the layers of a `TECudaGraphHelper`."""
        begin = time.perf_counter()
        for layer in helper.flattened_callables:
            self._calls.setdefault(type(layer), vars(type(layer)).get("__call__"))
        ran: set[str] = set()
        with ExitStack() as stack:
            for linear in self.model.linears:
                hook = linear.module.register_forward_pre_hook(_capture_hook(linear, ran))
                stack.callback(hook.remove)
            result = run()
        control = self.model.runtime.topology.control
        ranks = control.gather("reading captured linears", lambda: sorted(ran)).values
        names = {name for rank in ranks for name in rank}
        self._captured_linears[helper] = {name: self.model.changes[name] for name in names}
        self.was_slow = True
        seconds = time.perf_counter() - begin
        self._log(f"captured layers with {len(names)} planned linears in {seconds:.3g} s")
        return result

    def capture_again(self, helpers: dict[Any, dict[str, Any]]) -> None:
        """All ranks, before a step: replace graphs of layers that hold an older plan.

        Args:
            helpers: each `TECudaGraphHelper` with the arguments that it was made from.
        """
        for helper, arguments in helpers.items():
            num_changed = self._num_changed(helper)
            if num_changed == 0:
                continue
            self._log(
                f"capturing layers again: {num_changed} captured linears have a new option "
                "(--snip-change-penalty makes such changes rarer)"
            )
            if helper.graphs_created():
                helper.delete_cuda_graphs()
            else:  # a pipeline stage without layers that Megatron captures
                self.forget(helper)
            helper.__init__(**arguments)  # a capture changes the counts that it starts from
            with _without_gather_hooks(helper.model) as had_hooks:
                helper.create_cudagraphs()
            if had_hooks:
                helper.cuda_graph_set_manual_hooks()

    def run_step(self, function: Callable[..., Any], **kwargs: Any) -> Any:
        """All ranks: run Megatron's forward-backward function, with layers eager where needed.

        Captured layers run without their graphs while they are measured, and after an option
        changed, until they are captured again.
        """
        eager = [
            helper
            for helper in self._captured_linears
            if self.is_measuring or self._num_changed(helper)
        ]
        self.was_slow |= bool(eager)
        with ExitStack() as stack:
            for helper in eager:
                for layer in helper.flattened_callables:
                    stack.callback(setattr, layer, "cuda_graphs", layer.cuda_graphs)
                    layer.cuda_graphs = []
            if eager:
                stack.enter_context(_called_as_before(self._calls))
            return function(**kwargs)

    def forget(self, helper: Any) -> None:
        """Forget graphs that are about to be deleted."""
        self._captured_linears.pop(helper, None)

    def _gather_parameters_again(self) -> None:
        """Let the next eager forward gather parameters (`--overlap-param-gather`).

        An evaluation or a checkpoint gathers them and notes that in Python, for the next forward.
        A replay does not clear the note, so a later forward would run on old parameters.
        """
        from megatron_snip.linears.te.gathered_weights import bucket_groups

        for chunk in self.model.chunks:
            for group in bucket_groups(chunk):
                group.param_gather_dispatched = False

    def _num_changed(self, helper: Any) -> int:
        """Return how many linears have changed since the helper captured them.

        A linear that was changed back counts: its quantized weights lie in other memory.
        """
        captured = self._captured_linears.get(helper, {})
        return sum(self.model.changes[name] != number for name, number in captured.items())

    def _log(self, text: str) -> None:
        if self.model.runtime.topology.rank == 0:
            logger.info("snip: iteration %d: %s", self.model.runtime.iteration, text)


def _capture_hook(linear: PlannedLinear, captured: set[str]) -> Callable[..., None]:
    """Return a hook for a linear's forward while layers are captured; it notes the linear."""
    from megatron_snip.linears.te.linear import RecipeTELinear

    def before_forward(module: Any, args: Any) -> None:
        captured.add(linear.name)
        if isinstance(linear, RecipeTELinear):
            linear.prepare_capture()

    return before_forward


@contextmanager
def _called_as_before(calls: dict[type, Any]) -> Iterator[None]:
    """Call layers as before they were captured.

    Transformer Engine wraps the `__call__` of captured layers' classes, and afterwards puts back
    what it found. In a class that inherits it from another one (Megatron's `MLPLayer`) it found the
    other's wrapper (seen in 2.8 to 2.20). Under that a layer takes itself for captured, and keeps
    the quantized weights of the last replay.
    """
    found = {kind: vars(kind).get("__call__") for kind in calls}
    _set_calls(calls)
    try:
        yield
    finally:
        _set_calls(found)


def _set_calls(calls: dict[type, Any]) -> None:
    for kind, call in calls.items():
        if call is not None:
            kind.__call__ = call  # type: ignore[method-assign]
        elif "__call__" in vars(kind):
            del kind.__call__


def _reset(wrapper: Any, stage: str) -> None:
    """Drop a stage's graph, as `FullCudaGraphWrapper.reset_cuda_graph` of 0.19 does."""
    wrapper.cuda_graph[stage] = None
    wrapper.result[stage] = None
    wrapper.curr_iteration[stage] = 0


@contextmanager
def _without_gather_hooks(chunks: Any) -> Iterator[bool]:
    """Remove the hooks that gather parameters before a forward; yield whether there were any."""
    hooked = [c for c in chunks if getattr(c, "remove_forward_pre_hook_handles", None)]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    try:
        yield bool(hooked)
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
