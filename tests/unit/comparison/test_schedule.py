"""Which runs a comparison takes, that they are paired, and that equal runs are one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from megatron_snip.comparison.contender import DEFAULT
from megatron_snip.comparison.run import Run
from megatron_snip.comparison.schedule import SPELLED_OUT, Schedule, make_schedule
from megatron_snip.options import Option
from megatron_snip.trainer.checkpoint_folder import ORDER_FIELDS
from megatron_snip.trainer.config import make_train_config
from tests.unit.comparison.build import TRAIN, comparison

HELD_OUT = (*ORDER_FIELDS, "eval_iters", "eval_interval")
SCRATCH = {"base_steps": 3, "steps": 8, "interval": 4, "own_base": True}


def settings(run: Run) -> dict[str, Any]:
    return make_train_config(dict(run.values)).model_dump(mode="json")


def branches(schedule: Schedule) -> list[Run]:
    return [run for run in schedule.runs if run.kind == "branch"]


def test_every_contender_of_every_seed_has_a_run_and_uniform_ones_serve_all_targets() -> None:
    schedule = make_schedule(comparison(targets=(0.5, 0.75), seeds=3))
    assert len(schedule.entries) == len(DEFAULT) * 2 * 3
    uniform, heeding = 3, len(DEFAULT) - 3
    assert len(branches(schedule)) == 3 * uniform + 3 * 2 * heeding
    assert sum(run.kind == "base" for run in schedule.runs) == 1
    assert sum(run.kind == "measure" for run in schedule.runs) == 3


def test_bf16_and_fp8_serve_all_lowest_formats() -> None:
    schedule = make_schedule(comparison(lowest=("fp3", "fp4"), seeds=1))
    by_name: dict[str, set[str]] = defaultdict(set)
    for entry in schedule.entries:
        by_name[entry.contender].add(entry.run.key)
    assert len(by_name["bf16"]) == len(by_name["fp8"]) == len(by_name["fp3"]) == 1
    assert len(by_name["random"]) == 2


def test_what_a_run_needs_comes_before_it() -> None:
    schedule = make_schedule(comparison(modes=("forks", "scratch"), lowest=("fp3", "fp4")))
    place = {run.key: k for k, run in enumerate(schedule.runs)}
    assert len(place) == len(schedule.runs)
    for run in schedule.runs:
        assert all(place[needed.key] < place[run.key] for needed in run.needs)


def test_contenders_of_a_seed_see_the_same_data_from_the_same_checkpoint() -> None:
    schedule = make_schedule(comparison(modes=("forks", "scratch"), scratch=SCRATCH, seeds=3))
    pairs: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for entry in schedule.entries:
        pairs[entry.mode, entry.seed].append(entry.run)
    data = {}
    for place, runs in pairs.items():
        kinds = {tuple(settings(run)[name] for name in HELD_OUT) for run in runs}
        bases = {run.base.key for run in runs if run.base is not None}
        assert len(kinds) == len(bases) == 1
        data[place] = kinds.pop()
        for run in runs:
            if run.measurement is not None:
                assert run.measurement.base == run.base
                measured = settings(run.measurement)
                assert all(measured[n] == settings(run)[n] for n in ORDER_FIELDS)
    assert len(set(data.values())) == len(data), "seeds see different data"


def test_only_snip_differs_between_contenders() -> None:
    schedule = make_schedule(comparison(seeds=1))
    plain = [{k: v for k, v in run.values.items() if k != "snip"} for run in branches(schedule)]
    assert all(values == plain[0] for values in plain)
    snips = [run.values["snip"] for run in branches(schedule)]
    assert len({str(sorted(snip.items())) for snip in snips}) == len(snips)


def test_forks_share_a_base_and_runs_from_scratch_have_their_own() -> None:
    schedule = make_schedule(comparison(modes=("forks", "scratch"), scratch=SCRATCH, seeds=3))
    bases = [run for run in schedule.runs if run.kind == "base"]
    assert [run.name for run in bases] == [
        "forks-base",
        "scratch-base-s0",
        "scratch-base-s1",
        "scratch-base-s2",
    ]
    assert [settings(run)["seed"] for run in bases] == [1234, 1234, 1235, 1236]
    by_name = {run.name: run for run in branches(schedule)}
    # A run from scratch goes on with its base's data, a fork takes others.
    assert settings(by_name["scratch-bf16-s1"])["seed"] == 1235
    assert settings(by_name["forks-bf16-s0"])["seed"] == 1235
    assert by_name["scratch-bf16-s1"].first_step == 3
    assert by_name["scratch-bf16-s1"].last_step == 11


def test_forks_keep_their_plan_and_runs_with_an_interval_refresh() -> None:
    config = comparison(modes=("forks", "scratch"), scratch=SCRATCH, seeds=1)
    by_name = {run.name: run for run in make_schedule(config).runs}
    fork = make_train_config(dict(by_name["forks-fp3-75-snip-gemm-s0"].values)).snip
    assert fork.freeze_plan
    assert fork.stop_step == 0
    assert fork.granularity == "gemm"
    long = make_train_config(dict(by_name["scratch-fp3-75-snip-gemm-s0"].values)).snip
    assert not long.freeze_plan
    assert (long.start_step, long.interval, long.stop_step) == (7, 4, None)
    assert by_name["forks-fp3-75-random-s0"].measurement is None
    assert not make_train_config(dict(by_name["forks-bf16-s0"].values)).snip.enabled


def test_rounding_differs_between_seeds() -> None:
    entries = make_schedule(comparison(policies=("bf16", "random"), seeds=3)).entries
    seeds = [settings(e.run)["snip"]["seed"] for e in entries if e.contender == "random"]
    assert seeds == [0, 1, 2]


def test_base_and_branch_follow_one_learning_rate_schedule() -> None:
    config = comparison(train={**TRAIN, "lr_decay_style": "cosine"})
    runs = make_schedule(config).runs
    assert {settings(run)["lr_decay_iters"] for run in runs} == {10}


def test_a_cooldown_goes_from_the_bases_rate_to_zero() -> None:
    config = comparison(forks={"base_steps": 6, "steps": 4, "cooldown": True}, seeds=1)
    base, branch = (settings(run) for run in make_schedule(config).runs[:2])
    assert (base["lr"], base["lr_decay_style"]) == (3e-3, "constant")
    assert branch["lr_decay_style"] == "linear"

    def rate(step: int) -> float:
        warm_up, decay = branch["lr_warmup_iters"], branch["lr_decay_iters"]
        return float(branch["lr"] * (1 - (step - warm_up) / (decay - warm_up)))

    assert rate(6) == pytest.approx(3e-3)
    assert rate(8) == pytest.approx(1.5e-3)
    assert rate(10) == pytest.approx(branch["min_lr"])


def test_a_key_depends_on_settings_and_on_what_is_needed_and_on_nothing_else() -> None:
    first, again = (make_schedule(comparison()).runs for _ in range(2))
    assert [run.key for run in first] == [run.key for run in again]
    moved = make_schedule(comparison(output="elsewhere", jobs=7)).runs
    assert [run.key for run in first] == [run.key for run in moved]
    longer = make_schedule(comparison(forks={"base_steps": 7, "steps": 4})).runs
    assert not {run.key for run in first} & {run.key for run in longer}


def test_more_policies_seeds_and_targets_only_add_runs() -> None:
    few = make_schedule(comparison(policies=("bf16", "random"), seeds=1)).runs
    many = make_schedule(comparison(targets=(0.5, 0.75), seeds=3, modes=("scratch", "forks"))).runs
    assert {run.key for run in few} < {run.key for run in many}


def test_tables_fill_one_after_the_other() -> None:
    entries = make_schedule(comparison(lowest=("fp3", "fp4"), targets=(0.75, 0.9))).entries
    order = list(dict.fromkeys((e.target, e.lowest, e.seed) for e in entries))
    assert order[:5] == [
        (0.75, "fp3", 0),
        (0.75, "fp3", 1),
        (0.75, "fp4", 0),
        (0.75, "fp4", 1),
        (0.9, "fp3", 0),
    ]


def test_a_contender_of_the_configuration_differs_by_its_settings() -> None:
    config = comparison(
        policies=("bf16", "sharp"), contenders={"sharp": {"weight_lambda": 0.01}}, seeds=1
    )
    run = make_schedule(config).entries[-1].run
    assert make_train_config(dict(run.values)).snip.weight_lambda == 0.01
    assert run.measurement is not None


def test_what_measuring_depends_on_is_spelled_out_where_something_is_measured() -> None:
    schedule = make_schedule(comparison(seeds=1))
    for run in schedule.runs:
        spelled = run.values.get("snip", {}).keys() >= SPELLED_OUT
        assert spelled == (run.kind == "measure" or run.measurement is not None)


def test_a_uniform_contender_may_mix_formats_over_gemms() -> None:
    mixed = {"backward": {"policy": "uniform-fp8-fp3-fp3"}}
    config = comparison(policies=("bf16", "backward"), contenders=mixed, seeds=1)
    snip = make_train_config(dict(make_schedule(config).entries[-1].run.values)).snip
    assert snip.formats == ("fp8", "fp3")
    assert Option.parse("fp8-fp3-fp3") in snip.options
