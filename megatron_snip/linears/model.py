"""All planned linears of this rank: install the overrides, apply a plan, undo."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.utils import get_model_config

from megatron_snip.collectives import Gathered
from megatron_snip.config import Backend
from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import Format
from megatron_snip.linears.discovery import find_linears, own_linears
from megatron_snip.linears.job import Job, job_of
from megatron_snip.linears.megatron_linear import SimulatedMegatronLinear
from megatron_snip.linears.planned_linear import PlannedLinear, PlannedTELinear
from megatron_snip.linears.runtime import UNKNOWN_TOKENS, MicrobatchTokens, Runtime
from megatron_snip.linears.te.fresh_weights import FreshWeights
from megatron_snip.linears.te.fused_mlp import FusedMLP, fused_linears, fused_mlps
from megatron_snip.linears.te.gathered_weights import GatheredWeights, gather_weights
from megatron_snip.linears.te.job import file_rules, rule_of
from megatron_snip.linears.te.linear import RecipeTELinear
from megatron_snip.linears.te.machine import (
    Machine,
    measured_format,
    te_support,
    this_machine,
)
from megatron_snip.linears.te.modules import te_kind
from megatron_snip.linears.te.simulated import SimulatedTELinear
from megatron_snip.options import BF16, Option, Refusals
from megatron_snip.planning.fixed import FixedLinears
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.reporting.precision_record import LinearPrecision, PrecisionRecord
from megatron_snip.statistics.sharded import local
from megatron_snip.topology import Placement, Topology


class _Resolved(NamedTuple):
    """What runs a linear under an option; several values are joined by ` / `."""

    recipe: str
    backend: str
    weight_storage: str


class PlannedModel:
    """Megatron's model chunks with every linear of their layers under SNIP.

    Attributes:
        chunks: Megatron's model chunks.
        runtime: shared by all linears of this process.
        linears: this rank's linears, in model order; a grouped linear once.
        job: every linear of the model, and what the job runs without SNIP; the same on all ranks.
        changes: how often the option of each linear of the model has changed; the same on all
            ranks.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        topology: Topology,
        seed: int,
        backend: Backend = "auto",
        tokens: MicrobatchTokens = UNKNOWN_TOKENS,
    ) -> None:
        """All ranks: find the linears and agree on their global order.

        Raises:
            UnsupportedError: if ranks disagree about a linear, no rank has any, or the backend
                cannot run them.
        """
        self.chunks = list(model)
        self.runtime = Runtime(topology, seed, tokens)
        self.changes: Counter[str] = Counter()
        self._options: Mapping[str, Option] = {}
        self._resolved: dict[tuple[str, str], _Resolved] = {}  # by linear and option
        self.linears: list[PlannedLinear] = []
        self._overrides: list[FreshWeights | GatheredWeights | FusedMLP] = []
        self._refusals: dict[Option, dict[str, str]] = {}
        machine = Machine()
        has_te = False

        # Within the gather, so that a rank whose model cannot be read ends all ranks with its
        # error.
        def own_facts() -> dict[str, Any]:
            nonlocal machine, has_te
            found = find_linears(self.chunks, topology)
            has_te = backend != "simulate" and any(te_kind(module) for module, _ in found)
            machine = this_machine(has_te, self.config if found else None)
            return {"has_te": has_te, **self._own_facts(found, backend, machine)}

        facts = topology.control.gather("reading the model's linears", own_facts).values
        if any(rank["has_te"] for rank in facts) and not has_te:
            # A pipeline stage without layers: its settings and records are those of the others.
            machine = this_machine(True, self.config)
        varies = tokens.read is None
        self.job: Job = job_of(facts, topology.num_stages, len(self.chunks), machine, varies)

    @property
    def config(self) -> Any:
        """The model's TransformerConfig."""
        return get_model_config(self.chunks[0])

    @property
    def microbatch_tokens(self) -> int | None:
        """Tokens of a microbatch, over all ranks; None if they vary, or differ between linears."""
        tokens = {self.runtime.tokens.of_linear(linear.name) for linear in self.job.linears}
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

    def apply_together(self, read: Callable[[], PrecisionPlan]) -> PrecisionPlan:
        """All ranks: read a plan and `apply` it, or an error on every rank; return the plan.

        What the linears then run is gathered in the same exchange, for `resolved`.

        Args:
            read: returns the plan, the same on all ranks.

        Raises:
            RemoteFailure: on every rank, if one cannot read the plan, or a linear of it refuses.
                Linears of other ranks may then run the new options.
        """
        plans: list[PrecisionPlan] = []

        def applied() -> list[list[str]]:
            plans.append(read())
            self.apply(plans[0].linears)
            return self._new_rows()

        control = self.runtime.topology.control
        self._note_rows(control.gather("applying the plan", applied, may_refuse=False))
        return plans[0]

    def _new_rows(self) -> list[list[str]]:
        """Return what this rank's linears run, of those that were never asked under their option.

        [name, option, recipe, backend, weight storage]; several for one whose weights differ.
        """
        return [
            [linear.name, str(linear.option), linear.recipe, linear.backend, storage]
            for linear in self.linears
            if (linear.name, str(linear.option)) not in self._resolved
            for storage in dict.fromkeys(map(_storage, linear.weights))
        ]

    def _note_rows(self, gathered: Gathered) -> None:
        """All ranks: keep what `_new_rows` returned on all of them, joined by linear and option."""
        found: dict[tuple[str, str], list[list[str]]] = {}
        for rank in gathered.values:
            for name, option, *values in rank:
                found.setdefault((name, option), []).append(values)
        for key, rows in found.items():
            recipes, backends, storages = zip(*rows, strict=True)
            self._resolved[key] = _Resolved(_joined(recipes), _joined(backends), _joined(storages))

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

    def refusals_of(self, options: Iterable[Option]) -> Refusals:
        """All ranks, with the same options in the same order: return which linears refuse them."""
        wanted = list(dict.fromkeys(options))
        unknown = [option for option in wanted if option not in self._refusals]
        if unknown:

            def own_refusals() -> list[dict[str, str]]:
                own: list[dict[str, str]] = []
                for option in unknown:
                    reason_of = {linear.name: linear.refusal(option) for linear in self.linears}
                    own.append({name: why for name, why in reason_of.items() if why is not None})
                return own

            found: dict[Option, dict[str, str]] = {option: {} for option in unknown}
            control = self.runtime.topology.control
            for rank in control.gather("finding what linears can run", own_refusals).values:
                for option, refused in zip(unknown, rank, strict=True):
                    found[option].update(refused)
            self._refusals |= found
        return {option: self._refusals[option] for option in wanted}

    def evaluation_refusals(self, options: Sequence[Option] = ()) -> list[str]:
        """All ranks: return why evaluations cannot run options that training can run.

        The list is empty if they can. Transformer Engine needs multiples of some number of tokens,
        and a microbatch of an evaluation may have another number than one of training.

        Args:
            options: what any linear may run, the same on all ranks. Empty: what each runs now.
        """
        if self.runtime.tokens.evaluation is None:
            return []
        own = set()
        for linear in self.linears:
            if isinstance(linear, RecipeTELinear):
                possible = [each for each in options if linear.refusal(each) is None]
                reasons = map(linear.evaluation_refusal, possible if options else [linear.option])
                own |= {reason for reason in reasons if reason is not None}
        control = self.runtime.topology.control
        ranks = control.gather("finding what evaluations can run", lambda: sorted(own)).values
        return sorted({reason for rank in ranks for reason in rank})

    @contextmanager
    def running_as_job(self) -> Iterator[None]:
        """All ranks, while no forward-backward runs: run what the job itself runs in the block."""
        job = self.job.options
        if set(job.values()) == {BF16}:  # without `apply`, which drops quantizers and weights
            with self.runtime.running_in_bf16():
                yield
            return
        options = self._options
        self.apply(job)
        try:
            yield
        finally:
            self.apply(options)

    @property
    def experts_run_as_the_job(self) -> bool:
        """Whether every expert of this rank is untouched."""
        experts = (each for each in self.linears if each.placements[0].expert is not None)
        return all(expert.runs_as_job for expert in experts)

    def measured_formats(self, names: Iterable[str]) -> dict[str, Format]:
        """Return how each format is quantized where it runs, without bf16."""
        return {
            name: measured_format(name, self.job.backend, self.job.machine)
            for name in names
            if name != "bf16"
        }

    def recipes(self, names: Iterable[str]) -> dict[str, str]:
        """Return what runs each format: Transformer Engine's recipe; nothing in simulation."""
        if self.job.backend == "simulate":
            return {}
        recipes = {name: te_support(name, self.job.machine)[0] for name in names}
        return {name: recipe for name, recipe in recipes.items() if recipe}

    def resolved(
        self,
        plan: PrecisionPlan,
        iteration: int,
        fixed: FixedLinears | None = None,
        unused_rules: Sequence[str] = (),
    ) -> PrecisionRecord:
        """All ranks, after a plan was applied: return what all linears of the model resolved to.

        Args:
            plan: the current one.
            iteration: the first that runs under it.
            fixed: the linears whose option is fixed.
            unused_rules: rules that decide for no linear.
        """
        fixed = fixed or {}
        keys = [(name, str(option)) for name, option in plan.linears.items()]
        if any(key not in self._resolved for key in keys):
            control = self.runtime.topology.control
            self._note_rows(control.gather("reading what linears run", self._new_rows))
        rows = []
        for name, option in keys:
            source = str(fixed[name].source) if name in fixed else None
            rows.append(LinearPrecision(name, option, *self._resolved[name, option], source))
        return PrecisionRecord(
            iteration, plan.iteration, plan.digest, tuple(rows), tuple(unused_rules)
        )

    def weights(self, names: frozenset[str] | None = None) -> dict[Placement, torch.nn.Parameter]:
        """Return this rank's trained weights of the named linears, in model order."""
        return {
            placement: weight
            for linear in self.linears
            if names is None or linear.name in names
            for placement, weight in zip(linear.placements, linear.weights, strict=True)
            if weight.requires_grad
        }

    def _own_facts(
        self,
        found: Sequence[tuple[torch.nn.Module, Sequence[Placement]]],
        backend: Backend,
        machine: Machine,
    ) -> dict[str, Any]:
        """Put each of this rank's linears under its backend, and return what `job_of` needs.

        Raises:
            UnsupportedError: if a backend cannot run one of them.
        """
        fused_modules = {id(each) for chunk in self.chunks for each in fused_linears(chunk)}
        self.linears = [
            self._planned(module, places, backend, machine, id(module) in fused_modules)
            for module, places in found
        ]
        # Before `install` changes what the modules run.
        rules = {
            each.name: rule_of(each.module, each.name, id(each.module) in fused_modules)
            for each in self.linears
        }
        fused: list[FusedMLP] = []
        for chunk in self.chunks:
            fused += fused_mlps(chunk, self.linears, self.runtime)
            keeping = _keeping_weights(self.linears, set(chunk.modules()))
            if keeping:
                stored = [linear.stored for linear in keeping if linear.stored is not None]
                self._overrides += [FreshWeights(chunk, keeping), GatheredWeights(chunk, stored)]
        self._overrides += fused
        placements = [placement for _, places in found for placement in places]
        return {
            "linears": own_linears(placements),
            "shapes": {placement.name: placement.shard_shape for placement in placements},
            "experts": {
                linear.name: int(linear.module.config.num_moe_experts)
                for linear in self.linears
                if linear.placements[0].expert is not None
            },
            "options": {linear.name: str(linear.job_option) for linear in self.linears},
            "rules": {name: rule for name, rule in rules.items() if rule is not None},
            "ties": [list(mlp.names) for mlp in fused],
            "file": file_rules(self.chunks, fused_modules),
        }

    def _planned(
        self,
        module: torch.nn.Module,
        placements: Sequence[Placement],
        backend: Backend,
        machine: Machine,
        is_fused: bool,
    ) -> PlannedLinear:
        """Return a linear under its backend.

        Raises:
            UnsupportedError: if the chosen backend does not run it.
        """
        if te_kind(module) is not None:
            if backend == "simulate":
                return SimulatedTELinear(module, placements, self.runtime)
            return RecipeTELinear(module, placements, self.runtime, machine, is_fused)
        if backend == "te":
            raise UnsupportedError(
                f"--snip-backend te runs Transformer Engine's linears, and {placements[0].name} is "
                "Megatron's own; "
                "use --transformer-impl transformer_engine, or --snip-backend simulate"
            )
        return SimulatedMegatronLinear(module, placements, self.runtime)


def _keeping_weights(
    linears: Sequence[PlannedLinear], modules: Container[torch.nn.Module]
) -> list[PlannedTELinear]:
    """Return the linears of a chunk that make something of their weights in every step.

    Transformer Engine's recipes quantize weights; a simulated linear copies stored ones.
    """
    found: list[PlannedTELinear] = []
    for linear in linears:
        if linear.module not in modules:
            continue
        if isinstance(linear, RecipeTELinear) or (
            isinstance(linear, SimulatedTELinear) and linear.stored is not None
        ):
            found.append(linear)
    return found


def _joined(values: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(values))


def _storage(weight: torch.nn.Parameter) -> str:
    """Return the dtype of a parameter, or the class of one that is stored quantized."""
    kind = type(local(weight.data))
    if kind is torch.Tensor:
        return str(weight.dtype).removeprefix("torch.")
    return kind.__name__
