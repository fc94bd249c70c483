"""What a job is without SNIP: its linears, what each of them runs, and which of its rules fix that.

Every rank has the facts of its own pipeline stage; `job_of` makes one record of them, which is the
same on all ranks. `linears/te/job.py` reads what the job runs a Transformer Engine linear in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_snip.config import Backend
from megatron_snip.errors import UnsupportedError
from megatron_snip.linears.discovery import global_linears, stage_layers
from megatron_snip.linears.te.machine import Machine
from megatron_snip.options import Option
from megatron_snip.planning.fixed import Source
from megatron_snip.planning.plan import StageAndFlops
from megatron_snip.planning.stage_layers import StageLayers
from megatron_snip.topology import LinearInfo


@dataclass(frozen=True)
class Job:
    """What the job runs without SNIP; the same on all ranks.

    Attributes:
        options: the option that stands for what each linear runs.
        rules: which of the job's own rules fixes it, of the linears that one fixes.
        ties: groups of linears that must have one option, in model order.
        unused_rules: rules of the precision file that decide for no module of any rank.
        linears: every linear of the model, in model order.
        num_experts: number of experts of each linear that has any.
        stage_layers: which layers each pipeline stage holds; None where two layers of a chunk have
            one number.
        backend: what runs the linears; te if any rank's are Transformer Engine's.
        machine: what decides how Transformer Engine's linears run.
        has_varying_tokens: whether the tokens of a microbatch vary or are not known.
        shard_shapes: (out_features N, in_features K) of the weight that a rank multiplies, of each
            linear.
    """

    options: Mapping[str, Option]
    rules: Mapping[str, Source] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    unused_rules: tuple[str, ...] = ()
    linears: tuple[LinearInfo, ...] = ()
    num_experts: Mapping[str, int] = field(default_factory=dict)
    stage_layers: StageLayers | None = None
    backend: Backend = "simulate"
    machine: Machine = field(default_factory=Machine)
    has_varying_tokens: bool = False
    shard_shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def tied_to(self, name: str) -> tuple[str, ...]:
        """Return the linears that have the option of this one, itself among them."""
        return self._groups.get(name, (name,))

    @cached_property
    def stage_and_flops(self) -> StageAndFlops:
        """(stage, FLOPs per token) of each linear."""
        return {each.name: (each.stage, each.flops_per_token) for each in self.linears}

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        return {name: names for names in self.ties for name in names}


def job_of(
    facts: Sequence[Mapping[str, Any]],
    num_stages: int,
    num_chunks: int,
    machine: Machine,
    has_varying_tokens: bool,
) -> Job:
    """Return the record of a job.

    Args:
        facts: what every rank has found of its linears (`PlannedModel._own_facts`).
        num_stages: number of pipeline stages.
        num_chunks: number of model chunks of each stage.
        machine: what decides how Transformer Engine's linears run.
        has_varying_tokens: whether the tokens of a microbatch vary or are not known.

    Raises:
        UnsupportedError: if ranks disagree about a linear, or no rank has any.
    """
    linears = global_linears(rank["linears"] for rank in facts)
    if not linears:
        raise UnsupportedError(
            "the model's layers have no linears to plan: neither Megatron's "
            "ColumnParallelLinear and RowParallelLinear nor Transformer Engine's"
        )
    order = {linear.name: i for i, linear in enumerate(linears)}
    options: dict[str, Option] = {}
    rules: dict[str, Source] = {}
    ties: set[tuple[str, ...]] = set()
    num_experts: dict[str, int] = {}
    decides: dict[str, bool] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for rank in facts:
        options |= {name: Option.parse(text) for name, text in rank["options"].items()}
        rules |= {name: Source(text) for name, text in rank["rules"].items()}
        ties |= {tuple(names) for names in rank["ties"]}
        num_experts |= rank["experts"]
        shapes |= {name: (n, k) for name, (n, k) in rank["shapes"].items()}
        # A rule may match modules of another pipeline stage alone.
        for rule, does in rank["file"].items():
            decides[rule] = does or decides.get(rule, False)
    return Job(
        options=options,
        rules=rules,
        ties=tuple(sorted(ties, key=lambda names: order[names[0]])),
        unused_rules=tuple(rule for rule, does in decides.items() if not does),
        linears=linears,
        num_experts=num_experts,
        stage_layers=stage_layers(linears, num_stages, num_chunks),
        # A pipeline stage without layers has the backend of the others.
        backend="te" if any(rank["has_te"] for rank in facts) else "simulate",
        machine=machine,
        has_varying_tokens=has_varying_tokens,
        shard_shapes=shapes,
    )
