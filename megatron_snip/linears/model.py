"""All planned linears of this rank: install the overrides, apply a plan, undo."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_snip.collectives import Gathered
from megatron_snip.config import Backend
from megatron_snip.errors import UnsupportedError
from megatron_snip.formats import Format
from megatron_snip.linears.discovery import find_linears, global_linears, own_linears, stage_layers
from megatron_snip.linears.megatron_linear import SimulatedMegatronLinear
from megatron_snip.linears.planned_linear import PlannedLinear
from megatron_snip.linears.runtime import Runtime
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
from megatron_snip.options import BF16, Option
from megatron_snip.planning.fixed import FixedLinears, Source
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.statistics.sharded import local
from megatron_snip.topology import LinearInfo, Placement, Topology


@dataclass(frozen=True)
class Job:
    """What the job runs without SNIP; the same on all ranks.

    Attributes:
        options: the option that stands for what each linear runs.
        rules: which of the job's own rules fixes it, of the linears that one fixes.
        ties: groups of linears that must have one option, in model order.
        unused_rules: rules of the precision file that decide for no module of any rank.
        has_te: whether Transformer Engine runs linears of any rank.
    """

    options: Mapping[str, Option]
    rules: Mapping[str, Source] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    unused_rules: tuple[str, ...] = ()
    has_te: bool = False

    def tied_to(self, name: str) -> tuple[str, ...]:
        """Return the linears that have the option of this one, itself among them."""
        return self._groups.get(name, (name,))

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        return {name: names for names in self.ties for name in names}


class PlannedModel:
    """Megatron's model chunks with every linear of their layers under SNIP.

    Attributes:
        chunks: Megatron's model chunks.
        runtime: shared by all linears of this process.
        backend: what runs the linears; te if any of them is Transformer Engine's.
        machine: what decides how Transformer Engine's linears run.
        linears: this rank's linears, in model order; a grouped linear once.
        all_linears: every linear of the model, in the same order on all ranks.
        num_experts: number of experts of each linear that has any; the same on all ranks.
        stage_layers: which layers each pipeline stage holds, the same on all ranks; None where
            two layers of a chunk have one number.
        job: what the job runs without SNIP; the same on all ranks.
        refusals: what `option_refusals` has found so far; the same on all ranks.
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
        # (recipe, backend, weight storage) by linear and option; the same on all ranks.
        self._resolved: dict[tuple[str, str], tuple[str, ...]] = {}
        self.backend: Backend = "simulate"
        self.machine: Machine
        self.linears: list[PlannedLinear] = []
        self._overrides: list[FreshWeights | GatheredWeights | FusedMLP] = []
        self._own_ties: list[list[str]] = []
        self._own_rules: dict[str, Source] = {}
        self._own_file_rules: dict[str, bool] = {}
        reading = partial(self._own_facts, backend)
        facts = topology.control.gather("reading the model's linears", reading).values
        self.all_linears: tuple[LinearInfo, ...] = global_linears(rank["linears"] for rank in facts)
        self.num_experts = {name: n for rank in facts for name, n in rank["experts"].items()}
        self.stage_layers = stage_layers(self.all_linears, topology, len(self.chunks))
        self.refusals: dict[Option, dict[str, str]] = {}
        self.job = self._job_of(facts)
        if self.job.has_te and self.backend == "simulate" and backend != "simulate":
            # A pipeline stage without layers: its settings and records are those of the others.
            self.backend = "te"
            self.machine = this_machine(True, self.config)
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
            columns = zip(*rows, strict=True)
            self._resolved[key] = tuple(" / ".join(dict.fromkeys(each)) for each in columns)

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
        control = self.runtime.topology.control
        ranks = control.gather("finding what evaluations can run", lambda: sorted(own)).values
        return sorted({reason for rank in ranks for reason in rank})

    @contextmanager
    def running_as_job(self) -> Iterator[None]:
        """All ranks, while no forward-backward runs: run what the job itself runs in the block."""
        job = self.job.options
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

    @property
    def has_fused_mlps(self) -> bool:
        """Whether MLPs of any rank run fused operations; the same on all ranks."""
        return bool(self.job.ties)

    def _own_facts(self, backend: Backend) -> dict[str, Any]:
        """Find this rank's linears; return what all ranks must know of them, as JSON.

        Raises:
            UnsupportedError: if a backend cannot run one of them.
        """
        placements = self._plan_own_linears(backend)
        return {
            "linears": own_linears(placements),
            "experts": {
                linear.name: int(linear.module.config.num_moe_experts)
                for linear in self.linears
                if linear.placements[0].expert is not None
            },
            "has_te": self.backend == "te",
            "options": {linear.name: str(linear.job_option) for linear in self.linears},
            "rules": self._own_rules,
            "ties": self._own_ties,
            "file": self._own_file_rules,
        }

    def _job_of(self, facts: Iterable[Mapping[str, Any]]) -> Job:
        """Return what the job runs without SNIP, given the facts of all ranks."""
        has_te = False
        options: dict[str, Option] = {}
        rules: dict[str, Source] = {}
        ties: set[tuple[str, ...]] = set()
        decides: dict[str, bool] = {}
        for rank in facts:
            has_te |= rank["has_te"]
            options |= {name: Option.parse(text) for name, text in rank["options"].items()}
            rules |= {name: Source(text) for name, text in rank["rules"].items()}
            ties |= {tuple(names) for names in rank["ties"]}
            # A rule may match modules of another pipeline stage alone.
            for rule, does in rank["file"].items():
                decides[rule] = does or decides.get(rule, False)
        order = {linear.name: i for i, linear in enumerate(self.all_linears)}
        return Job(
            options,
            rules,
            tuple(sorted(ties, key=lambda names: order[names[0]])),
            tuple(rule for rule, does in decides.items() if not does),
            has_te,
        )

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

    def resolved(
        self, plan: PrecisionPlan, iteration: int, fixed: FixedLinears | None = None
    ) -> dict[str, Any]:
        """All ranks, after a plan was applied: return what all linears of the model resolved to.

        It is the content of precision/<iteration>.json (schema version 2), with the linears in the
        plan's order. A plan names options; the backend, the machine and Transformer Engine decide
        what runs:

            option          what the plan gives the linear
            recipe          what runs it: `megatron` (its own BF16 GEMMs), `simulated`, or
                            Transformer Engine's recipe
            backend         simulate or te
            weight_storage  dtype of the parameter between steps, or the class of a quantized one
            fixed           what fixes its option (`planning.fixed.Source`); null: the planner's

        If the ranks or experts that hold a linear report different values, they are joined by
        ` / `.

        Args:
            plan: the current one.
            iteration: the first that runs under it.
            fixed: the linears whose option is fixed.
        """
        fixed = fixed or {}
        keys = [(name, str(option)) for name, option in plan.linears.items()]
        if any(key not in self._resolved for key in keys):
            control = self.runtime.topology.control
            self._note_rows(control.gather("reading what linears run", self._new_rows))
        rows = []
        for name, option in keys:
            recipe, backend, storage = self._resolved[name, option]
            row = {"name": name, "option": option, "recipe": recipe, "backend": backend}
            source = str(fixed[name].source) if name in fixed else None
            rows.append({**row, "weight_storage": storage, "fixed": source})
        return {
            "version": 2,
            "iteration": iteration,
            "plan_iteration": plan.iteration,
            "plan_digest": plan.digest,
            "linears": rows,
        }

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
        fused_modules = {id(each) for chunk in self.chunks for each in fused_linears(chunk)}
        self.linears = [
            self._planned(module, places, backend, id(module) in fused_modules)
            for module, places in found
        ]
        # Before `install` changes what the modules run.
        rules = {
            each.name: rule_of(each.module, each.name, id(each.module) in fused_modules)
            for each in self.linears
        }
        self._own_rules = {name: rule for name, rule in rules.items() if rule is not None}
        self._own_file_rules = file_rules(self.chunks)
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
        self,
        module: torch.nn.Module,
        placements: Sequence[Placement],
        backend: Backend,
        is_fused: bool,
    ) -> PlannedLinear:
        """Return a linear under its backend.

        Raises:
            UnsupportedError: if the chosen backend does not run it.
        """
        if te_kind(module) is not None:
            if backend == "simulate":
                return SimulatedTELinear(module, placements, self.runtime)
            return RecipeTELinear(module, placements, self.runtime, self.machine, is_fused)
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
