"""A run of one rank with three linears, and the state of a stopped run."""

from types import SimpleNamespace
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.linears.job import Job
from megatron_snip.options import BF16, Option
from megatron_snip.planning.fixed import Source
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.stage_layers import StageLayers
from megatron_snip.run.guard import GuardState
from megatron_snip.run.loss_monitor import LossMonitor
from megatron_snip.run.plans import RunPlans
from megatron_snip.run.schedule import ScheduleState
from megatron_snip.run.solve import PendingProblem
from megatron_snip.run.state import RunState, reported_settings
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.topology import LinearInfo, Topology
from tests.unit.planning.build import name_of, options_of, plan_of, problem_of

FP8, FP4, NVFP4, MXFP8 = map(Option.uniform, ("fp8", "fp4", "nvfp4", "mxfp8"))
A, B, C = map(name_of, range(3))
STAGE_AND_FLOPS = {A: (0, 1.0), B: (1, 1.0), C: (1, 2.0)}
STAGE_LAYERS = StageLayers(
    [[{"decoder.layers.0": 0}], [{"decoder.layers.1": 0, "decoder.layers.2": 1}]]
)
FP8_JOB = {A: FP8, B: FP8, C: BF16}
"""What a job with FP8 runs the linears in."""

PLAN = plan_of(["fp4-fp8-bf16"], iteration=2, objective=None, target=0.5)
PENDING = PendingProblem(6, 8, problem_of([[0.0, 1.0]]))
GUARD = GuardState(
    loss=LossMonitor(recent=(2.0, 1.9)).after_plan_change(6.0),
    first_fallback=PLAN,
    refused=("0" * 64,),
    num_reverted=1,
    refresh_at=9,
)
STATE = RunState(
    iteration=7,
    plan=PLAN,
    run_id="c0ffee",
    history=((4, PLAN.digest),),
    target=0.5,
    schedule=ScheduleState(6),
    heal_from=6,
    solve=PENDING,
    guard=GUARD,
    observations=StatisticsTable(6, 1.5, ()),
    alerts=(("amax>1", "decoder.layers.0.mlp.linear_fc1"),),
    watched=("decoder.layers.0.mlp.linear_fc1",),
    settings={"formats": "fp8,fp4"},
)
"""Of a run of one linear that was stopped with a problem being solved; no part of it is empty."""


def run_plans(
    refusals: dict[Option, dict[str, str]] | None = None,
    job: dict[str, Option] | None = None,
    ties: tuple[tuple[str, ...], ...] = (),
    rules: dict[str, Source] | None = None,
    train_iters: int | None = None,
    job_facts: dict[str, Any] | None = None,
    **config: Any,
) -> RunPlans:
    """The plans of a run of one rank, whose linears refuse options as given.

    `job_facts`: other fields of the `Job`.
    """
    refused = refusals or {}

    infos = []
    for name, (stage, flops) in STAGE_AND_FLOPS.items():
        infos.append(LinearInfo(name, stage, 1, 1, flops))
    model: Any = SimpleNamespace(
        runtime=SimpleNamespace(topology=Topology()),
        job=Job(
            {name: (job or {}).get(name, BF16) for name in STAGE_AND_FLOPS},
            rules or {},
            ties,
            linears=tuple(infos),
            stage_layers=STAGE_LAYERS,
            **(job_facts or {}),
        ),
        refusals_of=lambda options: {option: refused.get(option, {}) for option in options},
        recipes=lambda names: {},
    )
    return RunPlans(SnipConfig(**{"formats": "fp8,fp4", **config}), model, train_iters, None)


def state_of(resumed: PrecisionPlan, file_digest: str | None = None, **former: Any) -> RunState:
    digests = {} if file_digest is None else {"plan_file": file_digest}
    config = SnipConfig(**{"formats": "fp8,fp4", **former})
    settings = reported_settings(config, "simulate", {}, digests)
    return RunState(6, resumed, settings=settings)


def first(resumed: RunState | None = None, **config: Any) -> list[str]:
    return options_of(run_plans(**config).first_plan(resumed, 0, 0 if resumed is None else 6).plan)
