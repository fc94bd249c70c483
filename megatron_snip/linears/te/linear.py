"""Transformer Engine's linears under a plan (`--snip-backend te`): Megatron's per-module recipes.

Each of Megatron's Transformer Engine linears has the attribute `te_quant_params`, which describes
the autocast that its forward runs in. SNIP sets it from the plan, with hooks of the module:

    before the forward    set the recipe: the plan's, or in BF16 evaluations BF16. Overlap
                          communication with GEMMs (`--tp-comm-overlap`) only if the recipe has a
                          buffer for it (overlap.py). If the recipe is not the job's, replace a
                          weight that is stored quantized by its copy in high precision
    after the forward     put a tap on the output, through which an observer sees X, W and G; put
                          the stored weight back

Transformer Engine reuses quantized weights until a microbatch is marked as the first of its step:
fresh_weights.py.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_snip.config import Backend
from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import Format
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.te.history import delayed_scales as scales_of_module
from megatron_snip.linears.te.history import keep_history
from megatron_snip.linears.te.job import job_option, job_recipe
from megatron_snip.linears.te.machine import Machine, forward_only, te_recipe
from megatron_snip.linears.te.modules import EXTENSION, weights_of
from megatron_snip.linears.te.overlap import overlap_flags, set_overlap
from megatron_snip.linears.te.recipe import BF16_RECIPE, TERecipe
from megatron_snip.linears.te.recipe_table import RECIPES, JobPrecision
from megatron_snip.linears.te.refusals import linear_refusal, te_refusal, token_refusal
from megatron_snip.linears.te.stored_weight import stored_weights
from megatron_snip.linears.te.tap import with_tap
from megatron_snip.options import Option
from megatron_snip.statistics.observer import DelayedScales
from megatron_snip.topology import Placement

_NEEDED = ("te_quant_params", "fp8_initialized", "fp8_meta_tensors_initialized", "_fp8_workspaces")
"""Attributes of a module that SNIP writes to change its precision."""


class RecipeTELinear:
    """A `PlannedLinear` of Transformer Engine that runs the plan's recipes.

    While its option is what the job itself runs, the module keeps the job's recipe and quantizers.

    Attributes:
        planned_params: Megatron's TEQuantizationParams of the option.
        runs_as_job: whether the option is what the job itself runs.
        stored: the weights, where the job stores them quantized, or None.
    """

    backend: Backend = "te"

    def __init__(
        self,
        module: Any,
        placements: Sequence[Placement],
        runtime: Runtime,
        machine: Machine,
        is_fused: bool = False,
    ) -> None:
        """Check the module.

        Args:
            module: Megatron's.
            placements: where its weights are.
            runtime: shared by all linears.
            machine: what it runs on.
            is_fused: whether its operations are fused with those of another linear.

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
        self._job_recipe = job_recipe(module, self.name, is_fused)
        self.job_option = job_option(self._job_recipe)
        if machine.backward_override:  # NVTE_BACKWARD_OVERRIDE: dgrad and wgrad run in BF16
            self.job_option = forward_only(self.job_option)
        self._params_before_snip = module.te_quant_params  # what `uninstall` restores
        self._bf16_params = quant_params(BF16_RECIPE)
        # What the linear runs while the plan gives it the job's option. (A precision file does not
        # count where operations are fused: Megatron does not call the linear, which would read it.)
        self._job_params = None if is_fused else self._params_before_snip
        if self._job_recipe == BF16_RECIPE:
            self._job_params = self._bf16_params
        # What the plan asks for; at first what the job runs.
        self._option = self.job_option
        self.runs_as_job = True
        self._planned_recipe = self._job_recipe
        self.planned_params = self._job_params
        self.stored = stored_weights(module, self.weights)
        self._overlap_flags = overlap_flags(module)
        self._hooks: list[Any] = []
        # Transformer Engine's recipe object for which the module has quantizers, or None.
        self._te_recipe_of_quantizers: Any = None

    @property
    def option(self) -> Option:
        """Formats of its GEMMs; assign while no forward-backward runs, on all ranks alike."""
        return self._option

    @option.setter
    def option(self, option: Option) -> None:
        if option == self._option:
            return
        self._option = option
        ran_as_job = self.runs_as_job
        self.runs_as_job = self._is_what_the_job_runs(option)
        if ran_as_job and self.runs_as_job:  # two names of one recipe, such as fp8 and mxfp8
            return
        if self.runs_as_job:
            self._planned_recipe = self._job_recipe
            self.planned_params = self._job_params
        else:
            self._planned_recipe = te_recipe(option, self._machine)
            self.planned_params = quant_params(self._planned_recipe)
        if self.stored is not None:
            self.stored.keeps_copies = not self.runs_as_job
        # Transformer Engine (up to 2.20) rebuilds quantizers if the recipe's class changes, but not
        # if only its fields do. Dropped also for BF16: quantized weights would take memory.
        self._te_recipe_of_quantizers = None
        reset_quantizers(self.module)

    @property
    def recipe(self) -> str:
        """Label of what Transformer Engine runs."""
        return str(self._planned_recipe)

    def delayed_scales(self, placement: Placement) -> DelayedScales | None:
        """Return a function that reads the scales of a weight; None without delayed scaling.

        Args:
            placement: which weight of the linear.
        """
        # The job's own recipe has no entry if SNIP does not know it (`job.CUSTOM`).
        entry = RECIPES.get(self._planned_recipe.fprop)
        if entry is None or not entry.has_history or self._runtime.runs_in_bf16(self.name):
            return None
        if scales_of_module(self.module) is None:
            return None
        index = self.placements.index(placement)

        def read(fmt: Format) -> Tensor:  # the run has one format with delayed scaling
            scales = scales_of_module(self.module, index)
            assert scales is not None
            return scales

        return read

    def refusal(self, option: Option) -> str | None:
        """Return why this linear cannot run `option` here, or None if it can."""
        if self._is_what_the_job_runs(option):  # whatever it is, it runs: shapes and gathers fit
            return None
        return linear_refusal(
            self.module,
            option,
            self._machine,
            self._job_recipe,
            is_expert=self.placements[0].expert is not None,
            microbatch_tokens=self._runtime.tokens.of_linear(self.name),
            stored=self.stored,
        )

    def evaluation_refusal(self, option: Option) -> str | None:
        """Return why evaluations cannot run an option that training can, or None.

        Args:
            option: one that `refusal` returns None for.
        """
        is_expert = self.placements[0].expert is not None  # Megatron pads an expert's tokens
        if is_expert or self._is_what_the_job_runs(option):
            return None
        of_run = self._runtime.tokens
        tokens = (of_run.evaluation or of_run).of_linear(self.name)
        return token_refusal(self.module, te_recipe(option, self._machine), tokens)

    def install(self) -> None:
        """Set the module's recipe from now on; idempotent."""
        if self._hooks:
            return
        # This hook runs before the other forward hooks, so they put their operations on top of the
        # tap. In the backward the tap then comes last. It must: it reads the weight, and under
        # Megatron-FSDP the operation of another hook gathers the weight.
        tap = self.module.register_forward_hook(self._after_forward, with_kwargs=True, prepend=True)
        self._hooks = [
            self.module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            tap,
        ]
        stored = self.stored
        if stored is not None:
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
        set_overlap(self.module, self._overlap_flags, None)
        self.module.te_quant_params = self._params_before_snip
        self.option = self.job_option

    def begin_step(self) -> None:
        """Drop what was made from the weights of the step before."""
        # Quantized weights stay in a run that quantizes by default: there Transformer Engine
        # quantizes again into the same memory, to which captured CUDA graphs write.
        if not self.runs_as_job and not JobPrecision.of(self.module.config).kind:
            self.module._fp8_workspaces.clear()
        if self.stored is not None:
            self.stored.begin_step()

    def _is_what_the_job_runs(self, option: Option) -> bool:
        # Its general name (fp8), or its exact one (mxfp8).
        if option == self.job_option:
            return True
        if te_refusal(option, self._machine) is not None:
            return False
        return te_recipe(option, self._machine) == self._job_recipe

    def prepare_capture(self) -> None:
        """Make the forward fit for a CUDA graph; call before it is captured."""
        # A graph repeats what its forward did: quantize the weight, or reuse the quantized one. In
        # a run that quantizes by default a flag on the device decides; Megatron sets it before each
        # replay. In another run a graph that reuses it would use the first quantized weight
        # forever.
        if not JobPrecision.of(self.module.config).kind:
            # With this, Megatron passes `is_first_microbatch=None`, and Transformer Engine then
            # keeps no quantized weight for the next microbatch.
            self.module.disable_parameter_transpose_cache = True
        if self.stored is not None:
            self.stored.prepare_capture()

    # A fused MLP does not call its linears, but Megatron calls their hooks: `_before_forward`
    # without `kwargs`, and `_after_forward` without `result`.
    def _before_forward(self, module: Any, args: Any, kwargs: Any = None) -> None:
        recipe: TERecipe | None  # None if it is the job's own
        if self._runtime.runs_in_bf16(self.name):
            module.te_quant_params = self._bf16_params
            recipe = None if self._job_recipe == BF16_RECIPE else BF16_RECIPE
        else:
            module.te_quant_params = self.planned_params
            recipe = None if self.runs_as_job else self._planned_recipe
        set_overlap(module, self._overlap_flags, recipe)
        if not self.runs_as_job and torch.is_grad_enabled():
            drop_nvfp4_without_columns(module)
        if self.stored is not None and recipe is not None:
            self.stored.override()
        if self._te_recipe_of_quantizers is not None:
            # A replayed CUDA graph writes the job's recipe into `fp8_meta`. Transformer Engine
            # would then see the plan's recipe as a new one, and free quantized weights that
            # captured kernels write to.
            module.fp8_meta["recipe"] = self._te_recipe_of_quantizers

    def _after_forward(self, module: Any, args: Any, kwargs: Any, result: Any = None) -> Any:
        if module.fp8_initialized:  # not after a forward in BF16
            self._te_recipe_of_quantizers = module.fp8_meta.get("recipe")
        return with_tap(self, self._runtime.observer, args, kwargs, result)


def quant_params(recipe: TERecipe) -> Any:
    """Return Megatron's TEQuantizationParams: the same recipe in training and evaluation."""
    extension: Any = sys.modules[EXTENSION]
    return extension.TEQuantizationParams(extension.TEQuantizationRecipe(**recipe.fields()), None)


def drop_nvfp4_without_columns(module: Any) -> None:
    """Drop a module's NVFP4 weights that were quantized in a forward without gradients."""
    # Such a forward quantizes the weight's rows alone, and dgrad multiplies its columns. Where
    # Megatron recomputes activations, the recomputed forward finds that weight. Transformer Engine
    # then quantizes it again if it is MXFP8, and from 2.12 on if it is NVFP4; until then it raises
    # an error.
    kept: dict[str, Any] = module._fp8_workspaces
    for name, weight in list(kept.items()):
        if "NVFP4" in type(weight).__name__ and weight._columnwise_data is None:
            del kept[name]


def reset_quantizers(module: Any) -> None:
    """Make Transformer Engine build a module's quantizers and quantized weights again.

    The state of delayed scaling is kept (history.py): the linear may run delayed scaling again.
    """
    module.fp8_initialized = False
    # Transformer Engine takes this flag for "the module holds a state of delayed scaling", and
    # `keep_history` returns whether it does.
    module.fp8_meta_tensors_initialized = keep_history(module)
    module._fp8_workspaces.clear()
