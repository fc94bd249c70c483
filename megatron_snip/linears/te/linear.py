"""Transformer Engine's linears under a plan: Megatron's per-module recipes, or simulated GEMMs.

Each of Megatron's Transformer Engine linears has the attribute `te_quant_params`, and runs its
forward in the autocast that this describes. SNIP sets the attribute from the plan. Two hooks of the
module do the rest: one before the forward sets the recipe (the plan's, or BF16 in BF16
evaluations), one after it lets an observer see X, W and G. Two properties of Transformer Engine
need care:

- It rebuilds quantizers when the recipe's class changes, and (up to 2.20) not when a recipe of
  the same class differs. So changing the option drops quantizers and quantized weights, also for
  BF16.
- It reuses quantized weights until a microbatch is marked as the first of its step; see
  `FreshWeights`.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_snip.config import Backend
from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.megatron_linear import SimulatedLinear
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.te.delayed_wgrad import deferrals
from megatron_snip.linears.te.history import delayed_scales, keep_history
from megatron_snip.linears.te.job import job_option, job_recipe
from megatron_snip.linears.te.machine import Machine, forward_only, te_recipe, te_refusal
from megatron_snip.linears.te.modules import (
    EXTENSION,
    gather_refusal,
    input_is_split,
    is_grouped,
    multiplied_input,
    output_is_split,
    shape_refusal,
    weights_of,
)
from megatron_snip.linears.te.overlap import Overlap
from megatron_snip.linears.te.recipe import RECIPES, TERecipe
from megatron_snip.linears.te.stored_weight import stored_weights
from megatron_snip.options import Option
from megatron_snip.topology import Placement

_FIRST_MICROBATCH = "set_is_first_microbatch"
_NEEDED = ("te_quant_params", "fp8_initialized", "fp8_meta_tensors_initialized", "_fp8_workspaces")
"""Attributes of a module that SNIP writes to change its precision."""


class RecipeTELinear:
    """One Transformer Engine linear that runs the plan's recipes; see `SimulatedLinear`.

    While its option is what the job itself runs, the module is left untouched.

    Attributes:
        job_option: the option that stands for what the job itself runs.
        is_untouched: whether the module runs as the job runs it.
        pinned: why it can run nothing else, or None.
        stored: its weights where the job stores them quantized, or None.
    """

    backend: Backend = "te"

    def __init__(
        self, module: Any, placements: Sequence[Placement], runtime: Runtime, machine: Machine
    ) -> None:
        """Check the module.

        Raises:
            UnsupportedError: if the module lacks an attribute that changes its precision.
        """
        self.module = module
        self.name = placements[0].name
        self.placements = tuple(placements)
        self.weights = weights_of(module)
        missing = [name for name in _NEEDED if not hasattr(module, name)]
        if missing:
            raise UnsupportedError(
                f"{self.name}: {type(module).__name__} has no {', '.join(missing)}; SNIP needs "
                f"{', '.join(_NEEDED)} to change its precision (Transformer Engine 2.8 or later "
                "under megatron-core 0.16 or later); use --snip-backend simulate"
            )
        self._runtime = runtime
        self._machine = machine
        self._job_recipe = job_recipe(module, self.name)
        self.job_option = job_option(self._job_recipe)
        if machine.backward_override:
            self.job_option = forward_only(self.job_option)
        self.pinned: str | None = None
        self._option = self.job_option
        self.is_untouched = True
        self._original = module.te_quant_params
        self._bf16 = quant_params(TERecipe())
        # In a BF16 run there is nothing to override.
        self._job = self._bf16 if self._job_recipe == TERecipe() else self._original
        self._planned = self._job
        self.stored = stored_weights(module, self.weights)
        self._overlap = Overlap(module)
        self._hooks: list[Any] = []
        self._last_recipe: Any = None  # that Transformer Engine has quantizers for

    @property
    def option(self) -> Option:
        """Formats of its GEMMs; assign between iterations only, on all ranks alike."""
        return self._option

    @option.setter
    def option(self, option: Option) -> None:
        if option == self._option:
            return
        self._option = option
        was_untouched = self.is_untouched
        self.is_untouched = self._is_the_jobs(option)
        if was_untouched and self.is_untouched:
            return
        self._planned = self._job
        if not self.is_untouched:
            self._planned = quant_params(te_recipe(option, self._machine))
        if self.stored is not None:
            self.stored.keeps_copies = not self.is_untouched
        self._last_recipe = None
        reset_quantizers(self.module)

    @property
    def recipe(self) -> str:
        """Label of what Transformer Engine runs."""
        if self.is_untouched:
            return str(self._job_recipe)
        return str(te_recipe(self._option, self._machine))

    @property
    def has_history(self) -> bool:
        """Whether it now runs delayed scaling."""
        if self._runtime.in_bf16:
            return False
        recipe = self._job_recipe if self.is_untouched else te_recipe(self._option, self._machine)
        return recipe.fprop in RECIPES and RECIPES[recipe.fprop].has_history

    def refusal(self, option: Option) -> str | None:
        """Return why this linear cannot run `option` here, or None if it can."""
        if self._is_the_jobs(option):
            return None
        if self.pinned is not None:
            return self.pinned
        reason = te_refusal(option, self._machine)
        if reason is not None:
            return reason
        recipe = te_recipe(option, self._machine)
        if self.stored is not None:
            reason = self.stored.refusal(recipe, self._job_recipe)
            if reason is not None:
                return reason
        if is_grouped(self.module) and not recipe.is_uniform:
            reason = self._machine.te_unavailable.get("custom experts")
            if reason is not None:
                return f"{option}: Transformer Engine {self._machine.te_version} {reason}"
        has_fp4 = any(RECIPES[name].run.kind == "fp4" for name in recipe)
        if has_fp4 and self.weights[0].dtype != torch.bfloat16:
            # Its random Hadamard transform is a kernel for BF16 (`NVFP4Quantizer::quantize_impl`).
            dtype = str(self.weights[0].dtype).removeprefix("torch.")
            return f"{option}: Transformer Engine's NVFP4 needs BF16 and got {dtype}; add --bf16"
        reason = gather_refusal(self.module, option, recipe)
        if reason is not None:
            return reason
        is_expert = self.placements[0].expert is not None
        return shape_refusal(self.module, is_expert, recipe, self._runtime.microbatch_tokens)

    def install(self) -> None:
        """Set the module's recipe from now on; idempotent."""
        if self._hooks:
            return
        self._hooks = [
            self.module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.module.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        if (stored := self.stored) is not None:
            restore = self.module.register_forward_hook(
                lambda *_: stored.restore(), always_call=True
            )
            self._hooks.append(restore)

    def uninstall(self) -> None:
        """Restore the module's own recipe; idempotent."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._overlap.set_recipe(None)
        self.module.te_quant_params = self._original
        self.option = self.job_option

    @property
    def planned_params(self) -> Any:
        """Megatron's TEQuantizationParams of the option."""
        return self._planned

    def begin_step(self) -> None:
        """Drop what was made of the weights of the step before."""
        # Where the run quantizes by default Transformer Engine quantizes them again, in place:
        # captured CUDA graphs write to that memory.
        if not self.is_untouched and not quantizes_by_default(self.module.config):
            self.module._fp8_workspaces.clear()
        if self.stored is not None:
            self.stored.begin_step()

    def _is_the_jobs(self, option: Option) -> bool:
        """Return whether the job itself runs the linear in this option."""
        if option == self.job_option:
            return True
        if te_refusal(option, self._machine) is not None:
            return False
        return te_recipe(option, self._machine) == self._job_recipe

    def prepare_capture(self) -> None:
        """Make the forward fit for a CUDA graph; call before it is captured.

        A graph repeats whether its forward quantized the weight. In a run that quantizes by
        default Transformer Engine decides that by a tensor which Megatron sets before a replay. In
        another run the weight is quantized in every microbatch, or replays would keep the first
        one's forever.
        """
        if not quantizes_by_default(self.module.config):
            self.module.disable_parameter_transpose_cache = True
        if self.stored is not None:
            self.stored.prepare_capture()

    def _recipe_in_forward(self) -> TERecipe | None:
        """Return what the next forward runs; None for the job's own recipe."""
        if self._runtime.in_bf16:
            return TERecipe() if self._job_recipe != TERecipe() else None
        return None if self.is_untouched else te_recipe(self._option, self._machine)

    # Megatron calls the hooks of linears whose operations are fused with fewer arguments.
    def _before_forward(self, module: Any, args: Any, kwargs: Any = None) -> None:
        recipe = self._bf16 if self._runtime.in_bf16 else self._planned
        module.te_quant_params = recipe
        self._overlap.set_recipe(self._recipe_in_forward())
        if self.stored is not None and recipe is not self._job:
            self.stored.override()
        if self._last_recipe is not None:
            # A replayed CUDA graph leaves the run's recipe here. Transformer Engine would take
            # the plan's for a change, and free quantized weights that captured kernels write to.
            module.fp8_meta["recipe"] = self._last_recipe

    def _after_forward(self, module: Any, args: Any, kwargs: Any, result: Any = None) -> Any:
        if module.fp8_initialized:  # not after a forward in BF16
            self._last_recipe = module.fp8_meta.get("recipe")
        return with_tap(self, args, kwargs, result)


class SimulatedTELinear(SimulatedLinear):
    """One Transformer Engine linear with simulated GEMMs: its `forward` is overridden.

    A linear at bf16 runs Transformer Engine's own forward with all arguments untouched. At any
    other option its GEMMs are simulated as those of Megatron's own linears are; what Transformer
    Engine fuses around them (norm, bias, tensor-parallel communication, accumulation into
    main_grad) is done by torch and Megatron's mappings. The rest of the model, also its attention,
    stays Transformer Engine's. So only the linears are slower than in a normal model.
    """

    _method = "forward"
    _bf16_recipe = "bf16"

    def __init__(self, module: Any, placements: Sequence[Placement], runtime: Runtime) -> None:
        """Prepare; nothing is overridden yet."""
        super().__init__(module, placements, runtime)
        self.stored = stored_weights(module, self.weights)
        if self.stored is not None:
            self.stored.keeps_copies = True

    def begin_step(self) -> None:
        """Drop what was made of the weights of the step before."""
        if self.stored is not None:
            self.stored.begin_step()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_bf16():
            output = self._original(*args, **kwargs)
        else:
            run = self._run_experts if is_grouped(self.module) else self._run
            output = run(*args, **kwargs)
            # While this is True, Transformer Engine's own wgrad overwrites main_grad.
            self.module.is_first_microbatch = False
        return with_tap(self, args, kwargs, output)

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        module = self.module
        parallel = module.parallel_mode if module.tp_size > 1 else None
        bias = module.bias if module.use_bias else None
        y = self._simulate(
            multiplied_input(module, x),
            self._multiplied_weights()[0],
            None,
            self.placements[0],
            module.tp_group,
            sequence_parallel=parallel == "column" and module.sequence_parallel,
            allreduce_dgrad=parallel == "column" and not module.sequence_parallel,
            fuse_wgrad=module.fuse_wgrad_accumulation,
            defer_wgrad=deferrals(module, 1)[0],
        )
        if parallel == "row" and module.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(y, group=module.tp_group)
        elif parallel == "row":
            y = reduce_from_tensor_model_parallel_region(y, group=module.tp_group)
        if bias is None or module.te_return_bias:
            return y, bias
        return y + bias, None

    def _multiplied_weights(self) -> Sequence[Tensor]:
        return weights_of(self.module) if self.stored is None else self.stored.copies()

    def _run_experts(self, x: Tensor, m_splits: Any) -> tuple[Tensor, list[Any] | None]:
        module = self.module
        sizes = _sizes(m_splits)
        biases = [
            getattr(module, f"bias{i}") if module.use_bias else None for i in range(len(sizes))
        ]
        added = [None] * len(sizes) if module.te_return_bias else biases
        weights = self._multiplied_weights()
        experts = zip(torch.split(x, sizes), weights, added, self.placements, strict=True)
        defers = deferrals(module, len(sizes))
        fused = module.fuse_wgrad_accumulation
        outputs = [
            self._simulate(*expert, fuse_wgrad=fused, defer_wgrad=defer)
            for expert, defer in zip(experts, defers, strict=True)
        ]
        y = torch.cat(outputs)
        return y, (biases if module.te_return_bias else None)


def with_tap(
    linear: SimulatedTELinear | RecipeTELinear,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> Any:
    """Return what a linear's forward returned, with a tap on the output of every weight's GEMM.

    Args:
        linear: what ran; an expert may have zero rows. The runtime's observer makes the taps; there
            are none without an observer, or in a forward without gradients (it is recomputed).
        args: of the forward.
        kwargs: of the forward.
        result: of the forward.
    """
    observer, module = linear._runtime.observer, linear.module
    if observer is None or not torch.is_grad_enabled() or result is None:
        return result  # Megatron calls hooks of fused linears without a result
    out, bias = result
    given = dict(zip(("x", "m_splits"), args, strict=False)) | kwargs
    if not is_grouped(module):
        scales = scales_of(linear, 0)
        tapped = observer.observe(
            linear.placements[0],
            given["x"],
            observed_weights(linear)[0],
            out,
            input_is_split=input_is_split(module),
            output_is_split=output_is_split(module),
            prepare_input=lambda rows: multiplied_input(module, rows, is_rounded=scales is None),
            delayed_scales=scales,
        )
        return tapped, bias
    sizes = _sizes(given["m_splits"])
    inputs, outputs = torch.split(given["x"], sizes), torch.split(out, sizes)
    experts = zip(linear.placements, inputs, observed_weights(linear), outputs, strict=True)
    tapped_experts = [
        observer.observe(p, x, w, y, delayed_scales=scales_of(linear, index))
        for index, (p, x, w, y) in enumerate(experts)
    ]
    return torch.cat(tapped_experts), bias


def scales_of(
    linear: SimulatedTELinear | RecipeTELinear, index: int
) -> Callable[[], Tensor] | None:
    """Return what reads the scales of delayed scaling; None if the linear runs another recipe."""
    has_history = isinstance(linear, RecipeTELinear) and linear.has_history
    if not has_history or delayed_scales(linear.module) is None:
        return None

    def read() -> Tensor:
        scales = delayed_scales(linear.module, index)
        assert scales is not None
        return scales

    return read


def observed_weights(
    linear: SimulatedTELinear | RecipeTELinear,
) -> list[Tensor | Callable[[], Tensor]]:
    """Return the weights, each as `StepObserver.observe` takes it."""
    if linear.stored is None:
        return list(weights_of(linear.module))
    return [partial(linear.stored.value, index) for index in range(len(linear.weights))]


def _sizes(m_splits: Any) -> list[int]:
    return m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)


class FreshWeights:
    """Makes Transformer Engine quantize the weights of one model chunk again in every step.

    Transformer Engine quantizes a weight in the first microbatch of a step and reuses the result.
    Megatron's schedules call `set_is_first_microbatch` on each chunk, in training and evaluation.
    But Megatron passes it on only where the run quantizes by default (from 0.19 also with
    `--te-precision-config-file`). In a BF16 run that SNIP plans, weights would be quantized once
    and never again (NVIDIA/Megatron-LM#5641).

    So the method is overridden on the chunk, and drops the quantized weights. Setting the modules'
    `is_first_microbatch` would also quantize again. But with it a fused weight gradient overwrites
    `main_grad` instead of adding to it, which is wrong for a module that runs twice in a
    microbatch.
    """

    def __init__(self, chunk: Any, linears: Collection[RecipeTELinear | SimulatedTELinear]) -> None:
        """Check the chunk.

        Args:
            chunk: what Megatron's schedules run.
            linears: those of its linears that run recipes.

        Raises:
            UnsupportedError: if the chunk has no such method.
        """
        if not hasattr(chunk, _FIRST_MICROBATCH):
            raise UnsupportedError(
                f"the model chunk {type(chunk).__name__} has no {_FIRST_MICROBATCH}, so quantized "
                "weights would become stale; wrap it in a MegatronModule"
            )
        self._chunk = chunk
        self._linears = linears
        self._original: Callable[[], None] = getattr(chunk, _FIRST_MICROBATCH)

    def install(self) -> None:
        """Override the instance's method; idempotent."""
        self._chunk.__dict__.setdefault(_FIRST_MICROBATCH, self._first_microbatch)

    def uninstall(self) -> None:
        """Restore the class's method, unless another override has replaced ours."""
        if self._chunk.__dict__.get(_FIRST_MICROBATCH) == self._first_microbatch:
            del self._chunk.__dict__[_FIRST_MICROBATCH]

    def _first_microbatch(self) -> None:
        for linear in self._linears:
            linear.begin_step()
        self._original()


def quantizes_by_default(config: Any) -> bool:
    """Return whether a run quantizes modules that have no recipe of their own."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def quant_params(recipe: TERecipe) -> Any:
    """Return Megatron's TEQuantizationParams: the same recipe in training and evaluation."""
    extension: Any = sys.modules[EXTENSION]
    return extension.TEQuantizationParams(extension.TEQuantizationRecipe(**recipe.fields()), None)


def reset_quantizers(module: Any) -> None:
    """Make Transformer Engine build a module's quantizers and quantized weights again.

    It keeps the state of delayed scaling, and replaces it where the recipe is another one.
    """
    module.fp8_initialized = False
    module.fp8_meta_tensors_initialized = keep_history(module)
    module._fp8_workspaces.clear()
