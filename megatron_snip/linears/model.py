"""All planned linears of this rank: install the overrides, apply a plan, undo."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_snip.collectives import any_rank, attempt, gather_json, unless_refused
from megatron_snip.config import Backend
from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import Format
from megatron_snip.linears.discovery import find_linears, global_linears, stage_layers
from megatron_snip.linears.megatron_linear import SimulatedMegatronLinear
from megatron_snip.linears.planned_linear import PlannedLinear
from megatron_snip.linears.runtime import Runtime
from megatron_snip.linears.te.fresh_weights import FreshWeights
from megatron_snip.linears.te.fused_mlp import FusedMLP, fused_mlps
from megatron_snip.linears.te.gathered_weights import GatheredWeights, gather_weights
from megatron_snip.linears.te.linear import RecipeTELinear
from megatron_snip.linears.te.machine import (
    Machine,
    measured_format,
    te_support,
    this_machine,
)
from megatron_snip.linears.te.modules import te_kind
from megatron_snip.linears.te.simulated import SimulatedTELinear
from megatron_snip.options import BF16, Option
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.statistics.sharded import local
from megatron_snip.topology import LinearInfo, Placement, Topology


class PlannedModel:
    """Megatron's model chunks with every linear of their layers under SNIP.

    Attributes:
        chunks: Megatron's model chunks.
        runtime: shared by all linears of this process.
        backend: what runs the linears; te if any of them is Transformer Engine's.
        machine: what decides how Transformer Engine's linears run.
        linears: this rank's linears, in model order; a grouped linear once.
        all_linears: every linear of the model, in the same order on all ranks.
        stage_layers: which layers each pipeline stage holds, the same on all ranks; None where
            numbers do not tell layers apart.
        has_fused_mlps: whether MLPs of any rank run fused operations; the same on all ranks.
        changes: how often the option of each linear of the model has changed; the same on all
            ranks.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        topology: Topology,
        seed: int,
        backend: Backend = "auto",
        microbatch_tokens: int | None = None,
        encoder_tokens: int | None = None,
    ) -> None:
        """All ranks: find the linears and agree on their global order.

        Raises:
            UnsupportedError: if ranks disagree about a linear, no rank has any, or the backend
                cannot run them.
        """
        self.chunks = list(model)
        self.runtime = Runtime(topology, seed, microbatch_tokens, encoder_tokens)
        self.changes: Counter[str] = Counter()
        self._options: Mapping[str, Option] = {}
        self.backend: Backend = "simulate"
        self.machine: Machine
        self.linears: list[PlannedLinear] = []
        self._overrides: list[FreshWeights | GatheredWeights | FusedMLP] = []
        self._own_ties: list[list[str]] = []
        reading = partial(self._plan_own_linears, backend)
        own = unless_refused("reading the model's linears", reading, topology.control)
        self.all_linears: tuple[LinearInfo, ...] = global_linears(own, topology)
        self.stage_layers = stage_layers(self.all_linears, topology, len(self.chunks))
        self.has_fused_mlps = any_rank(bool(self._own_ties), topology.control)
        if not self.all_linears:
            raise UnsupportedError(
                "the model's layers have no linears to plan: neither Megatron's "
                "ColumnParallelLinear and RowParallelLinear nor Transformer Engine's"
            )

    @property
    def config(self) -> Any:
        """The model's TransformerConfig."""
        return get_model_config(self.chunks[0])

    @property
    def microbatch_tokens(self) -> int | None:
        """Tokens of a microbatch, over all ranks; None if they vary, or differ between linears."""
        tokens = {self.runtime.tokens_of(linear.name) for linear in self.all_linears}
        return tokens.pop() if len(tokens) == 1 else None

    def install(self) -> None:
        """Override every linear; idempotent."""
        for linear in (*self.linears, *self._overrides):
            linear.install()

    def uninstall(self) -> None:
        """Restore Megatron's own methods; idempotent."""
        for linear in (*self.linears, *self._overrides):
            linear.uninstall()

    def apply(self, options: Mapping[str, Option]) -> None:
        """All ranks, while no forward-backward runs: set this rank's linears to their options.

        Args:
            options: the option of each linear, by name. Every linear of this rank is among them,
                and all ranks pass the same ones.
        """
        for name, option in options.items():
            if option != self._options.get(name):
                self.changes[name] += 1
        self._options = dict(options)
        for linear in self.linears:
            linear.option = options[linear.name]

    def gather_weights(self, optimizer: Any) -> None:
        """All ranks, before a forward: gather the weights if the plan needs exact copies.

        Gradients are zeroed then. Ranks that share weights have the same plan, so they lack the
        same copies. Nothing is done where no copy is missing.

        Args:
            optimizer: Megatron's.
        """
        gathered = [each for each in self._overrides if isinstance(each, GatheredWeights)]
        if any(each.lacks_copies for each in gathered):
            gather_weights(self.chunks, optimizer)

    def evaluation_refusals(self, options: Sequence[Option] = ()) -> list[str]:
        """All ranks: return why evaluations cannot run options that training can run.

        The list is empty if they can. Transformer Engine needs multiples of some number of tokens,
        and a microbatch of an evaluation may have another number than one of training.

        Args:
            options: what any linear may run, the same on all ranks. Empty: what each runs now.
        """
        if self.runtime.evaluation_tokens is None:
            return []
        own = set()
        for linear in self.linears:
            if isinstance(linear, RecipeTELinear):
                possible = [each for each in options if linear.refusal(each) is None]
                reasons = map(linear.evaluation_refusal, possible if options else [linear.option])
                own |= {reason for reason in reasons if reason is not None}
        ranks = gather_json(sorted(own), self.runtime.topology.control)
        return sorted({reason for rank in ranks for reason in rank})

    @contextmanager
    def running_as_job(self) -> Iterator[None]:
        """All ranks, while no forward-backward runs: run what the job itself runs in the block."""
        job = self.job_options()
        if set(job.values()) == {BF16}:
            with self.runtime.running_in_bf16():
                yield
            return
        options = self._options
        self.apply(job)
        try:
            yield
        finally:
            self.apply(options)

    def job_options(self) -> dict[str, Option]:
        """All ranks: return the option that stands for what the job itself runs, by linear."""
        own = {linear.name: str(linear.job_option) for linear in self.linears}
        ranks = gather_json(own, self.runtime.topology.control)
        return {name: Option.parse(text) for rank in ranks for name, text in rank.items()}

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """All ranks: return the groups of linears that must have one option, in model order."""
        order = {linear.name: i for i, linear in enumerate(self.all_linears)}
        gathered = gather_json(self._own_ties, self.runtime.topology.control)
        found = {tuple(names) for rank in gathered for names in rank}
        return tuple(sorted(found, key=lambda names: order[names[0]]))

    @property
    def experts_run_as_the_job(self) -> bool:
        """Whether every expert of this rank is untouched."""
        experts = (each for each in self.linears if each.placements[0].expert is not None)
        return all(expert.runs_as_job for expert in experts)

    def measured_formats(self, names: Iterable[str]) -> dict[str, Format]:
        """Return how each format is quantized where it runs, without bf16."""
        return {
            name: measured_format(name, self.backend, self.machine)
            for name in names
            if name != "bf16"
        }

    def recipes(self, names: Iterable[str]) -> dict[str, str]:
        """Return what runs each format: Transformer Engine's recipe; nothing in simulation."""
        if self.backend == "simulate":
            return {}
        recipes = {name: te_support(name, self.machine)[0] for name in names}
        return {name: recipe for name, recipe in recipes.items() if recipe}

    def resolved(self, plan: PrecisionPlan, iteration: int) -> dict[str, Any]:
        """All ranks, after a plan was applied: return what all linears of the model resolved to.

        It is the content of precision/<iteration>.json (schema version 2), with the linears in the
        plan's order. A plan names options; the backend, the machine and Transformer Engine decide
        what runs:

            option          what the plan gives the linear
            recipe          what runs it: `megatron` (its own BF16 GEMMs), `simulated`, or
                            Transformer Engine's recipe
            backend         simulate or te
            weight_storage  dtype of the parameter between steps, or the class of a quantized one

        If the ranks or experts that hold a linear report different values, they are joined by
        ` / `.

        Args:
            plan: the current one.
            iteration: the first that runs under it.
        """
        own = [
            [linear.name, str(linear.option), linear.recipe, linear.backend, _storage(weight)]
            for linear in self.linears
            for weight in linear.weights
        ]
        by_name: dict[str, list[list[str]]] = {}
        for rank in gather_json(own, self.runtime.topology.control):
            for name, *values in rank:
                by_name.setdefault(name, []).append(values)
        columns = ("option", "recipe", "backend", "weight_storage")
        rows = []
        for name in plan.linears:
            values = (" / ".join(dict.fromkeys(each)) for each in zip(*by_name[name], strict=True))
            rows.append({"name": name, **dict(zip(columns, values, strict=True))})
        return {
            "version": 2,
            "iteration": iteration,
            "plan_iteration": plan.iteration,
            "plan_digest": plan.digest,
            "linears": rows,
        }

    def delayed_scaling(self, of_all_ranks: bool, before_iteration: bool = False) -> dict[str, str]:
        """Return the histories of simulated delayed scaling, as `DelayedScaling.state_dict` does.

        Args:
            of_all_ranks: all ranks: return those of the linears of the entire model.
            before_iteration: return those that the last iteration started from.
        """
        topology = self.runtime.topology
        if not of_all_ranks:
            return self.runtime.delayed.state_dict(before_iteration)

        def counted_here() -> dict[str, str]:
            # Ranks that hold a shard or a replica have the same history; the first of them counts.
            own = self.runtime.delayed.state_dict(before_iteration)
            placements = (each for linear in self.linears for each in linear.placements)
            return {
                each.instance: own[each.instance]
                for each in placements
                if each.instance in own and not each.tp.rank and not topology.data_axis(each).rank
            }

        counted = attempt("saving histories of delayed scaling", counted_here, topology.control)
        parts = gather_json(counted, topology.control)
        return {name: text for part in parts for name, text in part.items()}

    def weights(self, names: frozenset[str] | None = None) -> dict[Placement, torch.nn.Parameter]:
        """Return this rank's trained weights of the named linears, in model order."""
        return {
            placement: weight
            for linear in self.linears
            if names is None or linear.name in names
            for placement, weight in zip(linear.placements, linear.weights, strict=True)
            if weight.requires_grad
        }

    def _plan_own_linears(self, backend: Backend) -> list[Placement]:
        """Find this rank's linears and put each under its backend; return where they are.

        Raises:
            UnsupportedError: if a backend cannot run one of them.
        """
        found = find_linears(self.chunks, self.runtime.topology)
        with_te = backend != "simulate" and any(te_kind(module) for module, _ in found)
        self.backend = "te" if with_te else "simulate"
        self.machine = this_machine(with_te, self.config if with_te else None)
        self.linears = [self._planned(module, places, backend) for module, places in found]
        fused: list[FusedMLP] = []
        for chunk in self.chunks:
            fused += fused_mlps(chunk, self.linears, self.runtime)
            keeping = _keeping_weights(self.linears, set(chunk.modules()))
            if keeping:
                stored = [linear.stored for linear in keeping if linear.stored is not None]
                self._overrides += [FreshWeights(chunk, keeping), GatheredWeights(chunk, stored)]
        self._overrides += fused
        self._own_ties = [list(mlp.names) for mlp in fused]
        return [placement for _, placements in found for placement in placements]

    def _planned(
        self, module: torch.nn.Module, placements: Sequence[Placement], backend: Backend
    ) -> PlannedLinear:
        """Return a linear under its backend.

        Raises:
            UnsupportedError: if the chosen backend does not run it.
        """
        if te_kind(module) is not None:
            if backend == "simulate":
                return SimulatedTELinear(module, placements, self.runtime)
            return RecipeTELinear(module, placements, self.runtime, self.machine)
        if backend == "te":
            raise UnsupportedError(
                f"--snip-backend te runs Transformer Engine's linears, and {placements[0].name} is "
                "Megatron's own; "
                "use --transformer-impl transformer_engine, or --snip-backend simulate"
            )
        return SimulatedMegatronLinear(module, placements, self.runtime)


def _keeping_weights(
    linears: Sequence[PlannedLinear], modules: Container[torch.nn.Module]
) -> list[RecipeTELinear | SimulatedTELinear]:
    """Return the linears of a chunk that make something of their weights in every step.

    Transformer Engine's recipes quantize weights; a simulated linear copies stored ones.
    """
    found: list[RecipeTELinear | SimulatedTELinear] = []
    for linear in linears:
        if linear.module not in modules:
            continue
        if isinstance(linear, RecipeTELinear) or (
            isinstance(linear, SimulatedTELinear) and linear.stored is not None
        ):
            found.append(linear)
    return found


def _storage(weight: torch.nn.Parameter) -> str:
    """Return the dtype of a parameter, or the class of one that is stored quantized."""
    kind = type(local(weight.data))
    if kind is torch.Tensor:
        return str(weight.dtype).removeprefix("torch.")
    return kind.__name__
