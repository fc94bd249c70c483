"""The cycle on two ranks: it closes, replays, resumes, and refuses what cannot work."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_snip.errors import SnipError
from megatron_snip.options import Option
from megatron_snip.planning.plan import PrecisionPlan, assignment_digest, read_plan, write_plan
from megatron_snip.planning.problem import read_problem
from megatron_snip.reporting.run_directory import RunDirectory
from megatron_snip.run.state import ControllerState
from megatron_snip.run.step import zero_gradients
from megatron_snip.trainer.data import iteration_batches
from megatron_snip.trainer.model import forward_step
from megatron_snip.types import Gemm
from tests.distributed.launch import ROOT, run_ranks
from tests.distributed.layouts import TP2
from tests.distributed.small_model import NARROW, Trainer, layout

MODEL = {**NARROW, **TP2}
SNIP: dict[str, Any] = {"interval": 4, "start_step": 2, "lag": 1, "efficiency_target": 0.5}
"""Refreshes at iterations 2 and 6; their plans are due before iterations 3 and 7."""
ALERT = "underflow>0.01"
SCHEDULED: dict[str, Any] = {**SNIP, "interval": 50, "granularity": "gemm"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "healed": {"target_schedule": "0:0.8,5:0.5", "heal_from": 8, "heal_order": "forward"},
    "static": {"policy": "last-blocks", "target_schedule": "0:0.75,5:~0.25,9:0.5"},
}


def everything(folder: str) -> dict[str, Any]:
    """On ranks: runs at once and in parts, refused settings, and a loop of one's own."""
    runs = {
        "uninterrupted": _run(SNIP, folder=Path(folder) / "uninterrupted"),
        "again": _run(SNIP),
        # Stopped while its problem is being solved, and again under its plan.
        "resumed": _run({**SNIP, "alert": ALERT}, (2, 2, 5)),
        "collect only": _run({**SNIP, "collect_only": True, "alert": ALERT}),
    }
    for name, snip in SCHEDULES.items():
        for parts in ((18,), (4, 6, 8)):
            runs[f"{name} {len(parts)}"] = _run({**SCHEDULED, **snip}, parts)
    return {**runs, "refusals": refusals(Path(folder)), "own loop": own_loop()}


def _run(
    snip: dict[str, Any], parts: tuple[int, ...] = (9,), folder: Path | None = None
) -> dict[str, Any]:
    """Train for so many iterations in each part; a part resumes from the state of the last one."""
    state, seen = None, []
    with layout({**MODEL, "train_iters": sum(parts)}) as trainer:
        for steps in parts:
            files = [RunDirectory(folder)] if folder is not None and dist.get_rank() == 0 else []
            controller = trainer.controller(snip, state=state, writers=files)
            before = {"_forward_impl" in p.module.__dict__ for p in controller.model.linears}
            trainer.advance(steps, controller)
            saved = json.loads(json.dumps(controller.state(trainer.step).to_dict()))
            state = ControllerState.from_dict(saved)
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


def refusals(folder: Path) -> dict[str, Any]:
    """On ranks: what cannot work is refused before training: the same error on every rank."""
    misfit = folder / "misfit.json"
    with layout(MODEL) as trainer:
        controller = trainer.controller({"policy": "uniform-fp4"})
        plan = controller.plan
        controller.close()
        if dist.get_rank() == 0:
            linears = {**plan.linears, "decoder.layers.9.mlp.linear_fc1": Option.uniform("fp4")}
            digest = assignment_digest(linears)
            write_plan(plan.model_copy(update={"linears": linears, "digest": digest}), misfit)
        dist.barrier()
        cases: dict[str, dict[str, Any]] = {
            "policy": {"policy": "clever"},
            "pin": {"pins": ("decoder.layers.7.*=fp8",)},
            "target": {"pins": ("*=fp8",), "efficiency_target": 0.1},
            "plan file": {"plan_file": misfit},
            "missing plan file": {"plan_file": folder / "nowhere.json"},
        }
        return {name: _refusal(trainer, snip) for name, snip in cases.items()}


def _refusal(trainer: Trainer, snip: dict[str, Any]) -> tuple[str, str]:
    try:
        trainer.controller(snip).close()
    except SnipError as error:
        return type(error).__name__, str(error)
    return "", ""


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
    saved = ControllerState.from_dict(scope["saved"])
    return {
        "lines": len(code.splitlines()),
        "trainer": expected,
        "shown": shown,
        "saved": [saved.iteration, saved.history],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cycles")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank returned."""
    return run_ranks(2, "tests.distributed.test_controller:everything", {"folder": str(folder)})


def test_plans_are_applied_lag_steps_after_they_were_measured(ranks: list[dict[str, Any]]) -> None:
    for result in (r["uninterrupted"] for r in ranks):
        assert [iteration for iteration, _ in result["history"]] == [3, 7]
        assert result["history"][-1][1] == result["digest"]
        assert result["installed"] == [True, False]
        assert result["warnings"] == []
    assert ranks[0]["uninterrupted"]["history"] == ranks[1]["uninterrupted"]["history"]


@pytest.mark.parametrize("run", ["again", "resumed"])
def test_a_run_replays_and_resumes_bit_by_bit(ranks: list[dict[str, Any]], run: str) -> None:
    """It resumes with its problem in flight, and again under its plan."""
    for result in ranks:
        for key in ("losses", "weights", "optimizer", "history", "digest"):
            assert result[run][key] == result["uninterrupted"][key]


def test_a_resumed_run_reports_its_plan_at_once(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        applied = [[], [[3, 2, False]], [[5, 2, True], [7, 6, False]]]
        assert result["resumed"]["applied"] == applied
        alerts = [[(i, kind) for i, kind, _ in part] for part in result["resumed"]["notices"]]
        assert alerts == [[(2, "health")], [], []]  # each linear is named once


def test_collecting_makes_no_plan(ranks: list[dict[str, Any]]) -> None:
    for watched in (result["collect only"] for result in ranks):
        assert watched["measured"] == [2, 6]
        assert watched["history"] == []
        assert set(watched["fractions"]) == {0.0}
        (((at, kind, text),),) = watched["notices"]  # every linear at the first refresh, then none
        assert (at, kind) == (2, "health")
        assert "alert underflow>0.01: decoder.layers." in text and " fp4 0." in text


def test_the_run_directory_holds_what_was_decided(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    run = folder / "uninterrupted"
    kinds = ("divergences", "health", "plans", "problems")
    for kind in kinds:
        assert sorted(p.name for p in (run / kind).iterdir()) == ["2.json", "6.json"]
    digests = [digest for _, digest in ranks[0]["uninterrupted"]["history"]]
    for step, digest in zip((2, 6), digests, strict=True):
        plan = read_plan(run / "plans" / f"{step}.json")
        problem = read_problem(run / "problems" / f"{step}.json")
        assert (plan.iteration, plan.digest) == (step, digest)
        assert plan.policy == "snip"
        assert plan.efficiency >= plan.target == problem.target == 0.5
        assert list(plan.linears) == list(problem.names)
        divergences = json.loads((run / "divergences" / f"{step}.json").read_text())
        assert [row["name"] for row in divergences["linears"]] == list(problem.names)


def test_targets_follow_a_schedule_without_measuring_and_resume(
    ranks: list[dict[str, Any]],
) -> None:
    first, second = ranks
    for name, measured in (("healed", [2]), ("static", [])):
        straight, resumed = first[f"{name} 1"], first[f"{name} 3"]
        for key in ("losses", "weights", "optimizer", "plans", "measured", "history", "warnings"):
            assert straight[key] == resumed[key], key
            assert second[f"{name} 1"][key] == second[f"{name} 3"][key], key
        assert straight["plans"] == second[f"{name} 1"]["plans"]
        assert (straight["measured"], straight["warnings"]) == (measured, [])
        for _, target, efficiency, _ in straight["plans"]:
            assert target <= efficiency + 1e-9 < target + 1 / 16  # the largest GEMM
    healed = {i: (target, low) for i, target, _, low in first["healed 1"]["plans"]}
    targets = [target for target, _ in healed.values()]
    assert targets == sorted(targets, reverse=True) and len(targets) >= 6
    assert targets[:2] == [0.8, 0.5] and targets[-1] == 0.0
    assert list(healed)[:3] == [3, 5, 9] and max(healed) < 17  # there is time for the last one
    kept = healed[5][1]
    for _, low in list(healed.values())[2:]:
        raised = [item for item in kept if item not in low]
        assert all(item in kept for item in low)
        assert all(gemm == "fprop" for _, gemm in raised) or not any(g == "fprop" for _, g in low)
        kept = low
    static = [(i, target) for i, target, _, _ in first["static 1"]["plans"]]
    assert static == [(1, 0.65), (2, 0.55), (3, 0.45), (4, 0.35), (5, 0.25), (9, 0.5)]


def test_what_cannot_work_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    first, second = (result["refusals"] for result in ranks)
    assert first == second
    wanted = {
        "policy": "unknown policy 'clever'; known: snip",
        "pin": "no linear's name matches",
        "target": "0.1",
        "plan file": "the model does not have decoder.layers.9.mlp.linear_fc1",
        "missing plan file": "cannot read plan file",
    }
    for case, text in wanted.items():
        kind, message = first[case]
        assert kind == "UsageError", (case, kind, message)
        assert text in message, (case, message)
        assert "\n" not in message


def test_a_loop_of_ones_own_trains_as_the_trainers(ranks: list[dict[str, Any]]) -> None:
    """The code of docs/extending.md, against the embedded trainer's loop: bit for bit."""
    for result in (r["own loop"] for r in ranks):
        assert result["lines"] < 30
        assert result["shown"] == result["trainer"]
        assert [iteration for iteration, _ in result["shown"]["history"]] == [13, 23]
        assert result["saved"] == [30, result["shown"]["history"]]


def test_of_a_repeated_iteration_the_last_run_is_measured() -> None:
    """Megatron repeats an iteration whose result it doubts, and goes on with the last gradients."""
    (runs,) = run_ranks(1, "tests.distributed.test_controller:repeated")
    assert runs["repeated"] == runs["once"]


def repeated() -> dict[str, Any]:
    """On a rank: what is known after an iteration that measures, run once and after a wrong run."""
    found = {}
    for name in ("once", "repeated"):
        with layout({**NARROW, "num_layers": 1}) as trainer:
            controller = trainer.controller({**SNIP, "lag": 5})
            trainer.advance(1, controller)
            hook: Any = controller if name == "once" else _Doubting(controller, trainer)
            trainer.advance(1, hook)
            state = controller.state(2).to_dict()
            found[name] = {key: state[key] for key in ("observations", "solve")}
            assert state["solve"] is not None and controller.history == []
            controller.close()
    return found


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
