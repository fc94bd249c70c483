"""The cycle on two ranks: it closes, replays, resumes, and refuses what cannot work."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_snip.errors import SnipError
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest, read_plan, write_plan
from megatron_snip.planning.problem import read_problem
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.run.state import RunState
from megatron_snip.run.step import zero_gradients
from megatron_snip.trainer.data import iteration_batches
from megatron_snip.trainer.model import forward_step
from megatron_snip.types import Gemm
from tests.distributed.launch import ROOT, run_ranks
from tests.distributed.layouts import TP2
from tests.distributed.small_model import NARROW, SolverHere, Trainer, layout

MODEL = {**NARROW, **TP2}
SNIP: dict[str, Any] = {"interval": 4, "start_step": 2, "lag": 1, "efficiency_target": 0.5}
"""Refreshes at iterations 2 and 6; their plans are due before iterations 3 and 7."""
NUM_ITERATIONS = 9
ALERT = "underflow>0.01"
SCHEDULED: dict[str, Any] = {**SNIP, "interval": 50, "granularity": "gemm"}
HEALED: dict[str, Any] = {
    **SCHEDULED,
    "target_schedule": "0:0.8,5:0.5",
    "heal_from": 8,
    "heal_order": "forward",
}
STATIC: dict[str, Any] = {
    **SCHEDULED,
    "policy": "last-blocks",
    "target_schedule": "0:0.75,5:~0.25,9:0.5",
}
REPLAYED = ("losses", "weights", "optimizer", "history", "digest")
"""What is the same, bit by bit, in a run that is repeated."""


def on_ranks(name: str, num_ranks: int = 2, **arguments: Any) -> list[Any]:
    """What a function of this module returned on each rank."""
    return run_ranks(num_ranks, f"tests.distributed.test_controller:{name}", arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cycle")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[dict[str, Any]]:
    """On each rank: a run at once, whose directory is `folder`."""
    return on_ranks("train", snip=SNIP, parts=[NUM_ITERATIONS], folder=str(folder))


def train(
    snip: dict[str, Any],
    parts: list[int],
    folder: str | None = None,
    solves_here: bool = False,
) -> dict[str, Any]:
    """On ranks: train for so many iterations in each part, which resumes from the one before."""
    solver = SolverHere() if solves_here else None
    state, seen = None, []
    with layout({**MODEL, "train_iters": sum(parts)}) as trainer:
        for steps in parts:
            writes = folder is not None and dist.get_rank() == 0
            files = [RunDirectory(Path(folder))] if writes else []
            controller = trainer.controller(snip, solver, state, files)
            before = {"_forward_impl" in p.module.__dict__ for p in controller.model.linears}
            trainer.advance(steps, controller)
            saved = json.loads(json.dumps(controller.state(trainer.step).to_dict()))
            state = RunState.from_dict(saved)
            controller.close()
            after = {"_forward_impl" in p.module.__dict__ for p in controller.model.linears}
            seen.append(trainer.events)
        plans = [(i, a.plan) for events in seen for i, a in events.applied if not a.resumed]
        return {
            **trainer.digests(),
            "history": controller.history,
            "digest": controller.plan.digest,
            "measured": [i for events in seen for i, _ in events.measured],
            "fractions": [v["lowest_precision_fraction"] for _, v in seen[-1].metrics],
            "installed": [*before, *after],
            "warnings": trainer.warnings,
            "applied": [
                [(i, a.plan.iteration, a.resumed) for i, a in events.applied] for events in seen
            ],
            "plans": [(i, p.target, p.efficiency, _low_gemms(p)) for i, p in plans],
            "notices": [[(i, n.kind, n.message) for i, n in events.notices] for events in seen],
        }


def _low_gemms(plan: PrecisionPlan) -> list[list[str]]:
    return [[n, g] for n, o in plan.linears.items() for g in Gemm if o[g] == "fp4"]


def test_plans_are_applied_lag_steps_after_they_were_measured(
    uninterrupted: list[dict[str, Any]],
) -> None:
    first, second = uninterrupted
    for rank in (first, second):
        assert [iteration for iteration, _ in rank["history"]] == [3, 7]
        assert rank["history"][-1][1] == rank["digest"]
        assert rank["installed"] == [True, False]
        assert rank["warnings"] == []
    assert first["history"] == second["history"]


def test_a_run_replays_bit_by_bit(uninterrupted: list[dict[str, Any]]) -> None:
    again = on_ranks("train", snip=SNIP, parts=[NUM_ITERATIONS])
    for rank, wanted in zip(again, uninterrupted, strict=True):
        assert {key: rank[key] for key in REPLAYED} == {key: wanted[key] for key in REPLAYED}


def test_a_run_resumes_bit_by_bit_and_reports_its_plan_at_once(
    uninterrupted: list[dict[str, Any]],
) -> None:
    """It is stopped while its problem is being solved, and again under its plan."""
    resumed = on_ranks("train", snip={**SNIP, "alert": ALERT}, parts=[2, 2, 5])
    for rank, wanted in zip(resumed, uninterrupted, strict=True):
        assert {key: rank[key] for key in REPLAYED} == {key: wanted[key] for key in REPLAYED}
        assert rank["applied"] == [[], [[3, 2, False]], [[5, 2, True], [7, 6, False]]]
        alerts = [[(i, kind) for i, kind, _ in part] for part in rank["notices"]]
        assert alerts == [[(2, "health")], [], []]  # each linear is named once


def test_collecting_makes_no_plan() -> None:
    snip = {**SNIP, "collect_only": True, "alert": ALERT}
    for rank in on_ranks("train", snip=snip, parts=[NUM_ITERATIONS]):
        assert rank["measured"] == [2, 6]
        assert rank["history"] == []
        assert set(rank["fractions"]) == {0.0}
        (((at, kind, text),),) = rank["notices"]  # every linear at the first refresh, then none
        assert (at, kind) == (2, "health")
        assert "alert underflow>0.01: decoder.layers." in text
        assert " fp4 0." in text


def test_the_run_directory_holds_what_was_decided(
    uninterrupted: list[dict[str, Any]], folder: Path
) -> None:
    kinds = ("divergences", "health", "plans", "problems")
    for kind in kinds:
        assert sorted(p.name for p in (folder / kind).iterdir()) == ["2.json", "6.json"]
    digests = [digest for _, digest in uninterrupted[0]["history"]]
    for step, digest in zip((2, 6), digests, strict=True):
        plan = read_plan(folder / "plans" / f"{step}.json")
        problem = read_problem(folder / "problems" / f"{step}.json")
        assert (plan.iteration, plan.digest) == (step, digest)
        assert plan.policy == "snip"
        assert plan.efficiency >= plan.target == problem.target == 0.5
        assert list(plan.linears) == list(problem.names)
        divergences = json.loads((folder / "divergences" / f"{step}.json").read_text())
        assert [row["name"] for row in divergences["linears"]] == list(problem.names)


@pytest.fixture(scope="module")
def healed() -> list[dict[str, Any]]:
    return on_ranks("train", snip=HEALED, parts=[18], solves_here=True)


@pytest.fixture(scope="module")
def static() -> list[dict[str, Any]]:
    return on_ranks("train", snip=STATIC, parts=[18], solves_here=True)


@pytest.mark.parametrize(("name", "snip"), [("healed", HEALED), ("static", STATIC)])
def test_a_schedule_of_targets_resumes_bit_by_bit(
    request: pytest.FixtureRequest, name: str, snip: dict[str, Any]
) -> None:
    straight = request.getfixturevalue(name)
    resumed = on_ranks("train", snip=snip, parts=[4, 6, 8], solves_here=True)
    for rank, wanted in zip(resumed, straight, strict=True):
        for key in (*REPLAYED, "plans", "measured", "warnings"):
            assert rank[key] == wanted[key], key
    assert straight[0]["plans"] == straight[1]["plans"]


@pytest.mark.parametrize(("name", "measured"), [("healed", [2]), ("static", [])])
def test_plans_reach_the_targets_of_a_schedule_without_measuring_anew(
    request: pytest.FixtureRequest, name: str, measured: list[int]
) -> None:
    run, _ = request.getfixturevalue(name)
    assert run["measured"] == measured
    assert run["warnings"] == []
    for _, target, efficiency, _ in run["plans"]:
        assert target <= efficiency + 1e-9 < target + 1 / 16  # the largest GEMM


def test_healing_raises_fprop_before_the_other_gemms(healed: list[dict[str, Any]]) -> None:
    plans = {i: (target, low) for i, target, _, low in healed[0]["plans"]}
    targets = [target for target, _ in plans.values()]
    assert targets == sorted(targets, reverse=True)
    assert len(targets) >= 6
    assert targets[:2] == [0.8, 0.5]
    assert targets[-1] == 0.0
    assert list(plans)[:3] == [3, 5, 9]
    assert max(plans) < 17  # there is time for the last one
    kept = plans[5][1]
    for _, low in list(plans.values())[2:]:
        raised = [item for item in kept if item not in low]
        assert all(item in kept for item in low)
        assert all(gemm == "fprop" for _, gemm in raised) or not any(g == "fprop" for _, g in low)
        kept = low


def test_a_policy_that_does_not_measure_follows_the_schedule(static: list[dict[str, Any]]) -> None:
    plans = [(i, target) for i, target, _, _ in static[0]["plans"]]
    assert plans == [(1, 0.65), (2, 0.55), (3, 0.45), (4, 0.35), (5, 0.25), (9, 0.5)]


def apply_fails_once() -> list[tuple[int, float]]:
    """On ranks: the first plan for a new target cannot be applied; (iteration, target) of plans."""
    snip = {**SNIP, "policy": "last-blocks", "target_schedule": "0:0.25,6:0.75"}
    with layout({**MODEL, "train_iters": 14}) as trainer:
        controller = trainer.controller(snip, SolverHere())
        apply = controller.model.apply
        failures = iter([MemoryError("no room")])

        def apply_later(options: Any) -> None:
            for failure in failures:
                raise failure
            apply(options)

        with mock.patch.object(controller.model, "apply", apply_later):
            trainer.advance(14, controller)
        controller.close()
        return [(i, applied.plan.target) for i, applied in trainer.events.applied]


def test_a_target_whose_plan_could_not_be_applied_is_planned_for_again() -> None:
    for plans in on_ranks("apply_fails_once"):
        (first, low), (second, high) = plans
        assert (first, low, high) == (1, 0.25, 0.75)
        assert second == 6 + SNIP["interval"] + SNIP["lag"]


@pytest.mark.parametrize(
    ("snip", "wanted"),
    [
        ({"policy": "clever"}, "unknown policy 'clever'; known: snip"),
        ({"pins": ["decoder.layers.7.*=fp8"]}, "no linear's name matches"),
        ({"pins": ["*=fp8"], "efficiency_target": 0.1}, "0.1"),
        ({"plan_file": "nowhere.json"}, "cannot read plan file"),
        (
            {"plan_file": "misfit.json"},
            "'decoder.layers.9.mlp.linear_fc1': no pipeline stage holds decoder.layers.9",
        ),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(
    tmp_path: Path, snip: dict[str, Any], wanted: str
) -> None:
    first, second = on_ranks("refusal", snip=snip, folder=str(tmp_path))
    assert first == second
    kind, message = first
    assert kind == "UsageError"
    assert wanted in message
    assert "\n" not in message


def refusal(snip: dict[str, Any], folder: str) -> tuple[str, str]:
    """On ranks: the error with which a run with these settings ends before training."""
    given = dict(snip)
    with layout(MODEL) as trainer:
        if "plan_file" in given:
            given["plan_file"] = Path(folder) / given["plan_file"]
            write_misfit(trainer, Path(folder) / "misfit.json")
        try:
            trainer.controller(given).close()
        except SnipError as error:
            return type(error).__name__, str(error)
    return "", ""


def write_misfit(trainer: Trainer, file: Path) -> None:
    """On ranks: write the plan of a model with one more linear."""
    controller = trainer.controller({"policy": "uniform-fp4"})
    plan = controller.plan
    controller.close()
    if dist.get_rank() == 0:
        linears = {**plan.linears, "decoder.layers.9.mlp.linear_fc1": Option.uniform("fp4")}
        digest = assignment_digest(linears)
        write_plan(plan.model_copy(update={"linears": linears, "digest": digest}), file)
    dist.barrier()


def test_a_loop_of_ones_own_trains_as_the_trainers() -> None:
    """The code of docs/extending.md, against the embedded trainer's loop: bit for bit."""
    for result in on_ranks("own_loop"):
        assert result["lines"] < 30
        assert result["shown"] == result["trainer"]
        assert [iteration for iteration, _ in result["shown"]["history"]] == [13, 23]
        assert result["saved"] == [30, result["shown"]["history"]]


def own_loop() -> dict[str, Any]:
    """On ranks: the loop that docs/extending.md shows, and the trainer's on the same data."""
    steady = {"lr_decay_style": "constant", "lr_warmup_iters": 0, "seq_length": 64}
    values = {**NARROW, **steady, "global_batch_size": 4, "micro_batch_size": 1}
    with layout(values) as trainer:
        hook = trainer.run(30, {"start_step": 11, "interval": 10, "efficiency_target": 0.5})
        expected = {"history": hook.history, "weights": trainer.digests()["weights"]}
    text = (ROOT / "docs" / "extending.md").read_text().split("## A training loop of your own")[1]
    code = text.split("```python\n")[1].split("```")[0]
    with layout(values) as trainer:
        data = (
            batch
            for iteration in range(1, 31)
            for batch in iteration_batches(
                trainer.samples, trainer.config, iteration, dist.get_rank(), 2
            )
        )
        model, optimizer = list(trainer.state.model), trainer.state.optimizer
        scope = {"model": model, "optimizer": optimizer, "data": data, "forward_step": forward_step}
        exec(compile(code, "extending.md", "exec"), scope)
        shown = {"history": scope["snip"].history, "weights": trainer.digests()["weights"]}
    saved = RunState.from_dict(scope["saved"])
    return {
        "lines": len(code.splitlines()),
        "trainer": expected,
        "shown": shown,
        "saved": [saved.iteration, saved.history],
    }


def test_of_a_repeated_iteration_the_last_run_is_measured() -> None:
    """Megatron repeats an iteration whose result it doubts, and goes on with the last gradients."""
    (runs,) = on_ranks("repeated", num_ranks=1)
    # The time of a repeated iteration is that of two runs, so it is not reported.
    assert (runs["once"].pop("is timed"), runs["repeated"].pop("is timed")) == (True, False)
    assert runs["repeated"] == runs["once"]


def repeated() -> dict[str, Any]:
    """On a rank: what is known after an iteration that measures, run once and after a wrong run."""
    found = {}
    for name in ("once", "repeated"):
        with layout({**NARROW, "num_layers": 1}) as trainer:
            controller = trainer.controller({**SNIP, "interval": 8, "lag": 5})
            trainer.advance(1, controller)
            hook: Any = controller if name == "once" else _Doubting(controller, trainer)
            trainer.advance(1, hook)
            state = controller.state(2).to_dict()
            found[name] = {key: state[key] for key in ("observations", "solve")}
            assert state["solve"] is not None and not controller.history
            trainer.advance(1, hook)  # an ordinary iteration
            found[name]["is timed"] = "step_s" in trainer.events.metrics[-1][1]
            controller.close()
    return found


@pytest.mark.parametrize(
    ("guard", "passed"), [(True, [True, True, False, False]), (False, [True] * 4)]
)
def test_microbatches_are_kept_only_where_an_iteration_may_run_again(
    guard: bool, passed: list[bool]
) -> None:
    """The guard judges the plan from iteration 3 on; before that the loop's iterator is used."""
    assert on_ranks("passed_data", num_ranks=1, guard=guard) == [passed]


def passed_data(guard: bool) -> list[bool]:
    """On a rank: whether the schedule of each iteration got the loop's own iterator."""
    found = []
    with layout({**NARROW, "num_layers": 1}) as trainer:
        controller = trainer.controller({**SNIP, "guard": guard}, SolverHere())
        run = controller.forward_backward

        def noting(iteration: int, function: Any, **kwargs: Any) -> Any:
            def noted(**passed: Any) -> Any:
                found.append(passed["data_iterator"] is kwargs["data_iterator"])
                return function(**passed)

            return run(iteration, noted, **kwargs)

        with mock.patch.object(controller, "forward_backward", noting):
            trainer.advance(4, controller)
        controller.close()
    return found


def test_an_iteration_that_is_given_up_is_not_in_the_state_before_it() -> None:
    """Megatron saves a checkpoint after the iteration before one whose result it cannot explain."""
    (changed,) = on_ranks("given_up", num_ranks=1)
    assert changed == []


def given_up() -> list[Any]:
    """On a rank: what of the state after an iteration the next one, run twice, has changed."""
    changed = []
    with layout({**NARROW, "num_layers": 1, "train_iters": NUM_ITERATIONS}) as trainer:
        controller = trainer.controller({**SNIP, "alert": ALERT}, SolverHere())
        hook: Any = _Doubting(controller, trainer)
        for done in range(NUM_ITERATIONS):
            saved = controller.state(done).to_dict()
            trainer.advance(1, hook)
            again = controller.state(done).to_dict()
            RunState.from_dict(again)
            changed += [(done, key) for key in saved if again[key] != saved[key]]
        controller.close()
    return changed


class _Doubting:
    """A controller whose iterations run first on other data."""

    def __init__(self, controller: Any, trainer: Trainer) -> None:
        self._controller = controller
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    def forward_backward(self, iteration: int, function: Any, **kwargs: Any) -> Any:
        state = self._trainer.state
        others = iteration_batches(self._trainer.samples, state.config, iteration + 5, 0, 1)
        wrong = {**kwargs, "data_iterator": [others]}
        self._controller.forward_backward(iteration, function, **wrong)
        zero_gradients(state.model, state.optimizer)
        return self._controller.forward_backward(iteration, function, **kwargs)
