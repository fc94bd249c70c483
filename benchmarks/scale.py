"""The control plane of large jobs: what is exchanged in each phase, and how long it takes.

    python -m benchmarks.scale [--ranks 8,16,32,64] [--models NAMES] [--json FILE]
    python -m benchmarks.scale --alone

forks gloo ranks on this machine. They run SNIP's own functions on the linears of published models,
without weights: each rank has the records that it would have in the model's layout. For each phase
it prints, of the rank with the most: exchanges, messages, bytes; and the shortest time of some
repetitions. `group` is the time from all ranks' call until they have exchanged something.
"computed" are seconds at more ranks, from the measured time of a hop between two ranks, the
measured bandwidth, and the CPU time of the rank with the most:

    seconds = exchanges * 2 ceil(log2 N) * hop + bytes(N) / bandwidth + CPU(N)

bytes(N) grow with log2 N. CPU(N) is a straight line in log2 N through what was measured at each
number of ranks: making tables and problems takes the same at any number of ranks. With one number
of ranks all of it is taken to grow.

`--alone` measures what one rank does: a refresh of 5,000 linears, and of 61 layers of 384 experts
that are all on that rank, without the solver; and the bytes of a checkpoint's state.

A row is added to benchmarks/results/scale.jsonl.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.machine import RESULTS, append_row
from megatron_snip.collectives import Control
from megatron_snip.config import Backend, SnipConfig
from megatron_snip.divergence.quality_loss import divergence_table, planning_problem
from megatron_snip.formats import get_format
from megatron_snip.kernels.launch import NUM_SUMS
from megatron_snip.linears.model import PlannedModel
from megatron_snip.options import BF16, Option
from megatron_snip.patches.agreement import refuse_differences, settings_of_rank
from megatron_snip.planning.plan import PrecisionPlan, assigned_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.run.plans import RunPlans
from megatron_snip.run.state import PendingProblem, RunState
from megatron_snip.run.step import StepLoss
from megatron_snip.statistics.measure import OperandSums
from megatron_snip.statistics.rank_sums import BatchCounts, MeasuredCounts, RankSums
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.statistics.reduce import reduce_sums
from megatron_snip.statistics.sample import MeasureSettings
from megatron_snip.topology import LinearInfo, Placement, Topology
from tests.distributed.launch import Server

FORMATS = ("fp8", "fp4")
COMPUTED_AT = (1024, 4096, 16384)
REPETITIONS = 3
"""By default."""
GOALS_S = {"group": 0.1, "start": 1.0, "refresh": 1.0, "watched": 0.002}
"""At 16,384 ranks, computed."""

Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Model:
    """The linears of a model and the layout in which it is trained.

    Attributes:
        layers: number of layers.
        dense: {linear: (out_features, in_features)} of each layer.
        experts: the same of an expert, in layers from `first_moe` on.
        num_experts: experts of a layer.
        topk: experts that see each token.
        first_moe: layers before it have no experts.
        stages: pipeline stages.
        expert_ranks: ranks that share the experts of a layer.
    """

    layers: int
    dense: Shapes
    stages: int
    experts: Shapes
    num_experts: int = 0
    topk: int = 0
    first_moe: int = 0
    expert_ranks: int = 1

    def placements(self, rank: int, size: int) -> list[Placement]:
        """Return the linears of a rank of a job of `size` ranks; the stages are outermost."""
        stages = min(self.stages, size)
        stage = rank * stages // size
        num_local = self.num_experts // self.expert_ranks
        first = rank % self.expert_ranks * num_local
        found = []
        for layer in range(stage * self.layers // stages, (stage + 1) * self.layers // stages):
            at = f"decoder.layers.{layer}"
            for name, (rows, cols) in self.dense.items():
                found.append(Placement(f"{at}.{name}", stage, "column", cols, rows))
            for name, (rows, cols) in self.experts.items() if layer >= self.first_moe else ():
                for expert in range(first, first + num_local):
                    place = Placement(f"{at}.mlp.experts.{name}", stage, "column", cols, rows)
                    found.append(replace(place, expert=expert, num_active=float(self.topk)))
        return found


def _dense(hidden: int, ffn: int, qkv: int) -> Shapes:
    return {
        "self_attention.linear_qkv": (qkv, hidden),
        "self_attention.linear_proj": (hidden, hidden),
        "mlp.linear_fc1": (2 * ffn, hidden),
        "mlp.linear_fc2": (hidden, ffn),
    }


_LATENT = {
    "self_attention.linear_q_down_proj": (1536, 7168),
    "self_attention.linear_q_up_proj": (24576, 1536),
    "self_attention.linear_kv_down_proj": (576, 7168),
    "self_attention.linear_kv_up_proj": (32768, 512),
    "self_attention.linear_proj": (7168, 16384),
    "mlp.shared_experts.linear_fc1": (4096, 7168),
    "mlp.shared_experts.linear_fc2": (7168, 2048),
}
_ROUTED = {"linear_fc1": (4096, 7168), "linear_fc2": (7168, 2048)}
MODELS = {
    "Llama-405B TP8 PP16": Model(126, _dense(16384, 53248, 18432), 16, {}),
    "DeepSeek-V3 EP64 PP16": Model(61, _LATENT, 16, _ROUTED, 256, 8, 3, 64),
    "Kimi-K2 EP8 PP16": Model(61, _LATENT, 16, _ROUTED, 384, 8, 1, 8),
}


class RecordModel(PlannedModel):
    """A planned model without modules: its linears are records."""

    def __init__(self, places: Sequence[Placement], num_experts: int, topology: Topology) -> None:
        """All ranks: agree on the linears, as for any model.

        Args:
            places: the linears of this rank.
            num_experts: experts of a layer.
            topology: this rank's place.
        """
        self._places = places
        self._num_experts = num_experts
        super().__init__([torch.nn.Module()], topology, seed=0)

    @property
    def config(self) -> Any:
        """No setting that an option depends on."""
        return SimpleNamespace()

    def _own_facts(self, found: Any, backend: Backend, machine: Any) -> dict[str, Any]:
        module: Any = torch.nn.Module()
        module.config = SimpleNamespace(num_moe_experts=self._num_experts)
        by_name: dict[str, list[Placement]] = {}
        for place in self._places:
            by_name.setdefault(place.name, []).append(place)
        found = [(module, tuple(places)) for places in by_name.values()]
        return super()._own_facts(found, backend, machine)

    def _planned(
        self,
        module: Any,
        placements: Sequence[Placement],
        backend: Backend,
        machine: Any,
        is_fused: bool,
    ) -> Any:
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        return SimpleNamespace(
            name=placements[0].name,
            placements=placements,
            module=module,
            job_option=BF16,
            option=BF16,
            recipe="megatron",
            backend="simulate",
            weights=[weight],
            refusal=lambda _: None,
        )


class Job:
    """One rank of a job: the records of its linears, and SNIP's phases on them."""

    def __init__(self, model: Model, control: Control) -> None:
        """All ranks: make the records of this rank's linears; exchanges nothing."""
        self.control = control
        self.num_experts = model.num_experts
        stages = min(model.stages, control.size)
        self.topology = Topology(control.rank, control.size, num_stages=stages, control=control)
        self.places = model.placements(control.rank, control.size)
        self.config = SnipConfig(formats=FORMATS, efficiency_target=0.5)
        self.linears: tuple[LinearInfo, ...] = ()
        self.table: StatisticsTable | None = None
        self.problem: PlanningProblem | None = None

    def start(self) -> None:
        """All ranks: what `patches.attach` and the controller exchange before training."""
        settings = settings_of_rank(self.config, argparse.Namespace())
        refuse_differences(self.control.gather("checking the model", lambda: settings))
        self.control.on_rank_0("opening --snip-output-dir", lambda: "a run")
        model = RecordModel(self.places, self.num_experts, self.topology)
        plans = RunPlans(self.config, model, None, None)
        first = plans.first_plan(None, seed=0)
        model.apply_together(lambda: first.plan)
        self.linears = model.job.linears

    def _plan(self) -> PrecisionPlan:
        fp4 = Option.uniform("fp4")
        stage_and_flops = {each.name: (each.stage, each.flops_per_token) for each in self.linears}
        return assigned_plan(dict.fromkeys(stage_and_flops, fp4), stage_and_flops, "fp4", "job")

    def refresh(self) -> None:
        """All ranks: from this rank's sums to a planning problem."""
        formats = {name: get_format(name) for name in FORMATS}
        of_experts = {each.name: self.num_experts for each in self.linears if each.is_of_experts}
        settings = MeasureSettings(formats, 1, 0, num_experts=of_experts)
        sums = self._sums(settings)
        table, _ = reduce_sums(sums, settings, self.linears, 1.0, 2.0, dict, self.control)

        def problem() -> PlanningProblem:
            options = self.config.options
            found = divergence_table(table, options, "fp4", self.config, warn=False)
            return planning_problem(found, 0.5)

        self.table = table
        self.problem = self.control.attempt("making a planning problem", problem)

    def state(self) -> RunState:
        """Return the state of a run that waits for a plan; `refresh` has been called."""
        assert self.problem is not None
        pending = PendingProblem(1, 2, self.problem)
        return RunState(1, self._plan(), observations=self.table, solve=pending)

    def _sums(self, settings: MeasureSettings) -> RankSums:
        own = RankSums(settings, self.topology)
        nothing = OperandSums.zeros(len(FORMATS), torch.device("cpu"))
        for place in self.places:
            if place.name not in own.sums:  # others for each linear: equal ones pack too well
                own.sums[place.name] = torch.rand_like(nothing.sums) + 1.0
            own.counts[place.name] = BatchCounts(1.0, 4096.0)
            own.measured[place.name] = MeasuredCounts(1.0, 4096.0, 1.0, 2.0)
            own.amax[place.name] = nothing.amax
            if place.expert is not None:
                own.experts[place.name, place.expert] = own.sums[place.name][..., :NUM_SUMS]
        return own

    def apply(self) -> None:
        """All ranks: get a plan from rank 0, and agree that it is applied."""
        found = self.control.on_rank_0("planning", lambda: self._plan().to_dict())
        self.control.gather("applying the plan", lambda: PrecisionPlan.from_dict(found).iteration)

    def watched(self) -> None:
        """All ranks: judge an iteration by its loss and gradients."""
        StepLoss([{"lm loss": torch.tensor([2.0, 1.0])}], self.topology).read_judged(True)

    def ordinary(self) -> None:
        """All ranks: read the loss of an iteration that is not judged."""
        StepLoss([{"lm loss": torch.tensor([2.0, 1.0])}], self.topology).read()

    @property
    def phases(self) -> dict[str, Callable[[], None]]:
        """What is measured, by name, in this order."""
        return {
            "start": self.start,
            "ordinary": self.ordinary,
            "watched": self.watched,
            "refresh": self.refresh,
            "apply": self.apply,
        }


def rank_of(model: str, repetitions: int) -> dict[str, Any]:
    """On ranks: what each phase exchanged on this rank, and how long it took."""
    dist.barrier()  # all have begun
    begin = time.perf_counter()
    control = Control.of_all_ranks()
    control.any(False)  # ranks connect when they first exchange something
    found: dict[str, Any] = {"group": {"seconds": time.perf_counter() - begin}}
    job = Job(MODELS[model], control)
    for name, run in job.phases.items():
        before = replace(control.traffic)
        wall: list[float] = []
        cpu: list[float] = []
        for _ in range(repetitions):
            begin, begin_cpu = time.perf_counter(), time.process_time()
            run()
            wall.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - begin_cpu)
        now = control.traffic
        found[name] = {
            "exchanges": (now.exchanges - before.exchanges) / repetitions,
            "messages": (now.messages - before.messages) / repetitions,
            "bytes": (now.num_bytes - before.num_bytes) / repetitions,
            "seconds": min(wall),
            "cpu_s": min(cpu),
        }
    return found


def hop_and_bandwidth() -> tuple[float, float]:
    """On two ranks: seconds of a small message between them, and bytes a second of a large one."""
    control = Control.of_all_ranks()

    def fastest(tensor: torch.Tensor, repetitions: int) -> float:
        times = []
        for _ in range(repetitions):
            begin = time.perf_counter()
            control.sum_(tensor)
            times.append((time.perf_counter() - begin) / 2)  # there and back
        return min(times)

    hop_s = fastest(torch.zeros(1), 300)
    large = torch.zeros(1_000_000, dtype=torch.float64)
    return hop_s, large.nbytes / (fastest(large, 5) - hop_s)


def computed(
    measured: Mapping[int, Mapping[str, float]], size: int, hop_s: float, bandwidth: float
) -> float:
    """Return a phase's seconds at `size` ranks, from what fewer ranks measured (by their number).

    The formula is that of the module's docstring.
    """
    most = max(measured)
    levels = math.ceil(math.log2(size))
    growth = levels / math.ceil(math.log2(most))
    cpu_s = growth * measured[most]["cpu_s"]
    if len(measured) > 1:
        counts = [math.log2(ranks) for ranks in measured]
        line = statistics.linear_regression(counts, [each["cpu_s"] for each in measured.values()])
        # A machine whose load changed may have measured less at more ranks.
        slope = max(0.0, line.slope)
        middle = statistics.fmean(each["cpu_s"] for each in measured.values())
        cpu_s = middle + slope * (levels - statistics.fmean(counts))
    hops = measured[most]["exchanges"] * 2 * levels
    return hops * hop_s + growth * measured[most]["bytes"] / bandwidth + cpu_s


def alone() -> dict[str, Any]:
    """Return what one rank needs for large models: CPU seconds of a refresh, bytes of a state."""
    dense = replace(MODELS["Llama-405B TP8 PP16"], stages=1, layers=1250)
    experts = replace(MODELS["Kimi-K2 EP8 PP16"], stages=1, expert_ranks=1)
    found: dict[str, Any] = {}
    for name, model in (("5,000 linears", dense), ("61 layers of 384 experts", experts)):
        job = Job(model, Control())
        job.start()
        times = []
        for _ in range(REPETITIONS):
            begin = time.process_time()
            job.refresh()
            times.append(time.process_time() - begin)
        found[name] = {"linears": len(job.linears), "refresh_cpu_s": min(times)}
    job = Job(replace(dense, layers=150), Control())
    job.start()
    job.refresh()
    state = job.state()
    sizes = {}
    for name, each in (("state", replace(state, solve=None)), ("state with a problem", state)):
        file = io.BytesIO()
        torch.save(each.to_dict(), file)  # as Megatron keeps it beside its own settings
        sizes[name] = file.tell()
    found["600 linears"] = sizes
    return found


def run(models: Sequence[str], sizes: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Return what was measured and computed, by model."""
    server = Server(preload=["benchmarks.scale"])
    try:
        pair = server.run(2, "benchmarks.scale:hop_and_bandwidth", {}, join=True).finished()
        hop_s, bandwidth = pair[0]
        result: dict[str, Any] = {"hop_us": 1e6 * hop_s, "mb_per_s": bandwidth / 1e6, "models": {}}
        for model in models:
            measured = {}
            for size in sizes:
                arguments = {"model": model, "repetitions": repetitions}
                ranks = server.run(size, "benchmarks.scale:rank_of", arguments, join=True)
                measured[size] = most_of(ranks.finished())
            result["models"][model] = {
                "measured": measured,
                "computed_s": {
                    size: {
                        name: computed(
                            {ranks: found[name] for ranks, found in measured.items()},
                            size,
                            hop_s,
                            bandwidth,
                        )
                        for name in measured[max(sizes)]
                        if name != "group"
                    }
                    for size in COMPUTED_AT
                },
            }
        return result
    finally:
        server.close()


def most_of(ranks: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return each phase's numbers of the rank that has the most."""
    return {
        phase: {name: max(rank[phase][name] for rank in ranks) for name in ranks[0][phase]}
        for phase in ranks[0]
    }


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Yield what is printed."""
    for model, found in result["models"].items():
        table = Table(title=f"{model}, measured: the rank with the most")
        for column in ("ranks", "phase", "exchanges", "messages", "bytes", "ms"):
            table.add_column(column, justify="right")
        for size, phases in found["measured"].items():
            for name, phase in phases.items():
                counts = [f"{phase.get(key, 0):,.0f}" for key in ("exchanges", "messages", "bytes")]
                table.add_row(str(size), name, *counts, f"{1e3 * phase['seconds']:.3g}")
        yield table
        table = Table(title=f"{model}, computed seconds")
        names = list(next(iter(found["computed_s"].values())))
        for column in ("ranks", *names):
            table.add_column(column, justify="right")
        for size, seconds in found["computed_s"].items():
            table.add_row(f"{size:,}", *(f"{seconds[name]:.3g}" for name in names))
        yield table


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,16,32,64", help="numbers of ranks to fork")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--json", type=Path, default=RESULTS / "scale.jsonl")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="of each phase")
    parser.add_argument("--alone", action="store_true", help="what one rank does for large models")
    arguments = parser.parse_args()
    if arguments.alone:
        row = {"alone": alone()}
        Console().print(row)
        append_row(arguments.json, row)
        return
    sizes = [int(size) for size in arguments.ranks.split(",")]
    result = run(arguments.models.split(","), sizes, arguments.repetitions)
    console = Console()
    console.print(
        f"a hop takes {result['hop_us']:.0f} us, and {result['mb_per_s']:.0f} MB a second pass "
        "between two ranks of this machine"
    )
    for table in tables(result):
        console.print(table)
    append_row(arguments.json, json.loads(json.dumps(result)))


if __name__ == "__main__":
    main()
