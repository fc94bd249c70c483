"""Divergences, baselines' scores, Q, what is forbidden, and the problem that the planner gets."""

import json
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_snip.config import SnipConfig
from megatron_snip.divergence.quality_loss import (
    LOSS_DIVERGENCES,
    WEIGHT_DIVERGENCES,
    DivergenceTable,
    absolute_error,
    check_divergences,
    divergence_table,
    divergences_dict,
    norms_of_fprop,
    norms_of_gradients,
    planning_problem,
    relative_error,
    unmeasured_problem,
)
from megatron_snip.errors import UsageError
from megatron_snip.log import forget_warnings
from megatron_snip.options import Granularity, Option, Refusals, enumerate_options
from megatron_snip.planning.fixed import Fixed, FixedLinears, Source
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.statistics.records import FormatStatistics, LinearStatistics
from megatron_snip.topology import LinearInfo
from tests.unit.divergence.build import errors, linear, table

FP8, FP4, BF16 = (Option.uniform(name) for name in ("fp8", "fp4", "bf16"))
# fp8: |eX| = 1 of |X| = 10, |eW| = 2 of |W| = 20, |eG| = 0.5 of |G| = 5; fp4: 16 times as much.
X, W, G = 1.0, 2.0, 0.5
NORMS = ("norms_fprop", "norms_dgrad", "norms_wgrad")
BOUND = 5 * (10 * W + X * 20)
"""|G| (|X| |eW| + |eX| |W|) of fp8; the bounds of all three GEMMs are equal here."""


def test_only_fprop_s_format_changes_the_loss() -> None:
    assert norms_of_fprop(linear(), FP8) == pytest.approx(BOUND)
    assert norms_of_fprop(linear(), Option("fp8", "fp4", "fp4")) == pytest.approx(BOUND)
    assert norms_of_fprop(linear(), Option("bf16", "fp4", "fp4")) == 0.0
    assert norms_of_gradients(linear(), FP8) == pytest.approx(2 * BOUND)
    assert norms_of_gradients(linear(), Option("fp4", "fp8", "bf16")) == pytest.approx(BOUND)
    assert norms_of_gradients(linear(), Option("bf16", "fp4", "fp8")) == pytest.approx(17 * BOUND)


def test_every_gemm_counts_its_two_operands() -> None:
    assert absolute_error(linear(), FP8) == pytest.approx(2 * (X + W + G))
    assert relative_error(linear(), FP8) == pytest.approx(6 * 0.1)
    mixed = Option("fp4", "bf16", "fp8")
    assert absolute_error(linear(), mixed) == pytest.approx(16 * (X + W) + (G + X))
    assert relative_error(linear(), mixed) == pytest.approx(16 * 0.2 + 0.2)
    assert absolute_error(linear(), BF16) == 0.0
    zeros = replace(linear(), input_square=0.0, weight_square=0.0, grad_square=0.0)
    assert relative_error(zeros, FP8) == 0.0
    assert math.isnan(relative_error(replace(zeros, input_square=math.nan), FP8))


def divergences(
    *rows: LinearStatistics,
    formats: tuple[str, ...] = ("fp8", "fp4"),
    granularity: Granularity = "linear",
    warn: bool = True,
    refusals: Refusals | None = None,
    fixed: FixedLinears | None = None,
    **config: Any,
) -> DivergenceTable:
    options = enumerate_options(formats, granularity)
    settings = SnipConfig(**config)
    return divergence_table(table(*rows), options, "fp4", settings, refusals, fixed, warn)


def two() -> list[LinearStatistics]:
    return [
        linear(0, fp8=errors(1.0), fp4=errors(16.0)),
        linear(1, stage=1, fp8=errors(2.0), fp4=errors(48.0)),
    ]


def test_the_most_fragile_linears_have_the_largest_quality_loss_in_the_lowest_precision() -> None:
    rows = [linear(i, fp4=errors(size), fp8=errors(9.0)) for i, size in enumerate((3.0, 8.0, 5.0))]
    nan = linear(3, fp4=errors(1.0, input_error_square=math.nan), fp8=errors(1.0))
    found = divergences(*rows, nan)
    names = [row.name for row in rows]
    assert found.most_fragile(2) == (names[1], names[2])
    assert found.most_fragile(10) == (names[1], names[2], names[0])


def test_q_is_each_part_over_its_sum_under_the_lowest_precision() -> None:
    found = divergences(*two())
    first, second = found.linears.values()
    assert first[FP8].quality_loss == pytest.approx(1.01 * 1 / 64)
    assert first[FP4].quality_loss == pytest.approx(1.01 * 16 / 64)
    assert second[FP4].quality_loss == pytest.approx(1.01 * 48 / 64)
    assert first[FP8].loss_divergence == pytest.approx(BOUND)
    assert first[FP8].weight_divergence == pytest.approx(2 * BOUND)
    assert (found.statistics.iteration, found.statistics.linears[1].stage) == (30, 1)


@pytest.mark.parametrize("weight_lambda", [0.0, 0.1, 2.0])
def test_the_uniform_lowest_plan_costs_one_plus_lambda(weight_lambda: float) -> None:
    found = divergences(*two(), weight_lambda=weight_lambda)
    total = sum(row[FP4].quality_loss or math.nan for row in found.linears.values())
    assert total == pytest.approx(1.0 + weight_lambda)


def test_units_of_loss_and_gradients_do_not_matter() -> None:
    def scaled(factor: float) -> list[float | None]:
        rows = [linear(i, fp8=errors(factor), fp4=errors((4 + i) * factor)) for i in range(3)]
        found = divergences(*rows)
        return [d.quality_loss for row in found.linears.values() for d in row.values()]

    assert scaled(1.0) == pytest.approx(scaled(1e-9))


def test_a_plugin_s_divergences_make_the_quality_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(linear: LinearStatistics, option: Option) -> float:
        return linear.formats[option.fprop].added["ours"]

    def weight(linear: LinearStatistics, option: Option) -> float:
        return 2.0 * option.bits

    monkeypatch.setitem(LOSS_DIVERGENCES, "ours", loss)
    monkeypatch.setitem(WEIGHT_DIVERGENCES, "bits", weight)
    formats = {"fp8": errors(1.0, added={"ours": 3.0}), "fp4": errors(9.0, added={"ours": 5.0})}
    found = divergences(linear(0, **formats), loss_divergence="ours", weight_divergence="bits")
    (row,) = found.linears.values()
    assert (row[FP8].loss_divergence, row[FP4].loss_divergence) == (3.0, 5.0)
    assert row[FP8].quality_loss == pytest.approx(3 / 5 + 0.01 * 8 / 4)
    assert row[FP4].quality_loss == pytest.approx(1.01)
    for name in ("loss_divergence", "weight_divergence"):
        with pytest.raises(UsageError, match=f"unknown {name} 'our'") as refused:
            check_divergences(SnipConfig(**{name: "our"}))
        assert refused.value.field == name
    check_divergences(SnipConfig(loss_divergence="ours", weight_divergence="bits"))


def test_where_a_plugin_s_divergence_fails_the_option_is_forbidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(linear: LinearStatistics, option: Option) -> float:
        return linear.formats[option.fprop].input_error_square / (option.bits - 12 or linear.stage)

    monkeypatch.setitem(LOSS_DIVERGENCES, "ours", loss)
    forget_warnings()
    with caplog.at_level(logging.WARNING):
        found = divergences(linear(0, stage=0), linear(1, stage=1), loss_divergence="ours")
    first, second = found.linears.values()
    assert first[FP4].quality_loss is None and first[FP8].quality_loss is not None
    assert second[FP4].quality_loss is not None
    failure, forbidden = caplog.records
    assert "loss_divergence 'ours' of a plugin failed: ZeroDivisionError" in failure.getMessage()
    assert failure.exc_info is not None  # the traceback names the plugin's file
    assert "option fp4 is forbidden for decoder.layers.0" in forbidden.getMessage()


BAD = [
    {"input_error_square": math.nan},
    {"weight_error_square": -1e9},
    {"grad_error_square": math.inf},
]


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_is_forbidden_with_one_warning(
    bad: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    rows = two()
    rows[0] = linear(0, fp8=errors(1.0), fp4=errors(16.0, **bad))
    with caplog.at_level(logging.WARNING):
        found = divergences(*rows)
    first, second = found.linears.values()
    assert first[FP4].quality_loss is None
    others = [first[FP8], *second.values()]
    assert all(d.quality_loss is not None and math.isfinite(d.quality_loss) for d in others)
    (record,) = caplog.records
    assert "option fp4 is forbidden for decoder.layers.0.mlp.linear_fc2" in record.getMessage()
    divergences(*rows, warn=False)
    assert len(caplog.records) == 1  # one rank warns
    if "grad_error_square" in bad:  # what does not count forbids nothing
        (row, _) = divergences(*rows, weight_lambda=0.0).linears.values()
        assert row[FP4].quality_loss is not None


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("also_lower", [False, True])
def test_an_unknown_number_leaves_no_linear_in_a_lower_precision_only(
    bad: dict[str, float], also_lower: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the plan would be FP4 where FP8 could not be measured."""
    rows = two()
    rows[0] = linear(0, fp8=errors(1.0, **bad), fp4=errors(16.0, **(bad if also_lower else {})))
    with caplog.at_level(logging.WARNING):
        found = divergences(*rows)
    first = next(iter(found.linears.values()))
    assert (first[FP8].quality_loss, first[FP4].quality_loss) == (0.0, None)
    (record,) = caplog.records
    assert "no finite quality loss for 1 of 2 linears" in record.getMessage()
    assert "they get fp8" in record.getMessage()
    # Where BF16 is an option it is known, and a known option of fewer bits stays one too.
    row = next(iter(divergences(*rows, formats=("bf16", "fp8", "fp4")).linears.values()))
    known = [option for option in (BF16, FP8, FP4) if row[option].quality_loss is not None]
    assert known == ([BF16] if also_lower else [BF16, FP4])


@pytest.mark.parametrize("pinned", ["fp8", "fp4"])
def test_a_pin_to_an_option_that_was_not_measured_is_obeyed(pinned: str) -> None:
    bad = {pinned: errors(1.0, input_error_square=math.nan)}
    rows = [linear(0, **{"fp8": errors(1.0), "fp4": errors(16.0), **bad}), *two()[1:]]
    fixed = {rows[0].name: Fixed(Option.uniform(pinned), Source.PIN)}
    problem = planning_problem(divergences(*rows, fixed=fixed), target=0.5)
    settings = PlanSettings(pins=(("*.layers.0.*", pinned),))
    plan = make_plan(problem, settings)
    assert str(plan.linears[rows[0].name]) == pinned
    assert plan.efficiency >= 0.5


@pytest.mark.parametrize("has_weights", [False, True])
def test_without_norms_everything_is_forbidden(has_weights: bool) -> None:
    """As 0 they would make every option free: an arbitrary plan."""
    some = FormatStatistics(weight_error_square=1.0) if has_weights else FormatStatistics()
    rows = [linear(i, fp8=some, fp4=some) for i in range(3)]
    rows += [replace(linear(3), input_square=math.nan), replace(linear(4), grad_square=math.nan)]
    found = divergences(*rows, formats=("bf16", "fp8", "fp4"), warn=False)
    for row in found.linears.values():
        assert [row[o].quality_loss for o in (BF16, FP8, FP4)] == [0.0, None, None]
    for costs in planning_problem(found, target=0.0).linears:
        scores = costs.options["fp4"].scores
        assert {scores[name] for name in ("norms", "rel_error")} == {None}


def test_divergences_of_products_are_refused_with_what_to_use() -> None:
    for field, name in (
        ("loss_divergence", "fisher"),
        ("loss_divergence", "first_plus_fisher"),
        ("weight_divergence", "updates"),
    ):
        with pytest.raises(UsageError, match=f"'{name}' needs products, .*; use norms") as refused:
            check_divergences(SnipConfig(**{field: name}))
        assert refused.value.field == field


@pytest.mark.parametrize("target", [0.5, 2 / 3, 0.75, 0.9])
def test_snip_by_norms_lowers_what_norms_gemm_lowers(target: float) -> None:
    """The same GEMMs among linears of equal FLOPs; among others no worse, up to the gap."""
    generator = random.Random(3)

    def plans(rows: Sequence[LinearStatistics]) -> list[PrecisionPlan]:
        found = divergences(*rows, formats=("bf16", "fp4"), granularity="gemm")
        problem = planning_problem(found, target)
        policies = ("snip", "norms-gemm")
        return [make_plan(problem, PlanSettings(policy=each, gap=1e-6)) for each in policies]

    sizes = [math.exp(generator.gauss(0, 1)) for _ in range(20)]
    equal = [linear(i, fp4=errors(size)) for i, size in enumerate(sizes)]
    snip, norms_gemm = plans(equal)
    assert snip.linears == norms_gemm.linears
    snip, norms_gemm = plans(
        [replace(row, flops_per_token=6.0 * (1 + i % 3)) for i, row in enumerate(equal)]
    )
    assert snip.objective is not None and norms_gemm.objective is not None
    assert snip.objective <= norms_gemm.objective * (1 + 1e-6)


@pytest.mark.parametrize("field", ["input_error_square", "grad_error_square"])
@pytest.mark.parametrize("lowest", [0.0, 1e-320, 1e-250])
def test_a_sum_of_zero_forbids_nothing(field: str, lowest: float) -> None:
    rows = [linear(i, fp8=errors(1.0), fp4=errors(0.0, **{field: lowest})) for i in range(4)]
    problem = planning_problem(divergences(*rows), target=0.5)
    assert all(row.options["fp8"].quality_loss is not None for row in problem.linears)


def test_formats_and_linears_that_were_not_measured_are_forbidden() -> None:
    never = LinearStatistics("decoder.layers.7.mlp.linear_fc1", 0, 128, 128, 1.0)
    rows = [linear(0, fp8=errors(1.0)), two()[1], never]
    found = divergences(*rows, formats=("bf16", "fp8", "fp4"))
    first = next(iter(found.linears.values()))
    assert first[FP4].quality_loss is None
    assert first[FP8].quality_loss is not None
    measured = dict.fromkeys(("fp8", "fp4"), errors(0.0))
    zeros = LinearStatistics("decoder.layers.8.mlp.linear_fc1", 0, 128, 128, 1.0, formats=measured)
    found = divergences(*two(), zeros, formats=("bf16", "fp8", "fp4"))
    *_, unseen = found.linears.values()  # no backward reached it: zeros are no measurement
    assert [unseen[o].quality_loss for o in (BF16, FP8, FP4)] == [0.0, None, None]


def test_a_linear_that_no_backward_reached_keeps_the_highest_precision(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Frozen first layers, in a job without bf16 among the formats: the others are planned."""
    forget_warnings()
    measured = dict.fromkeys(("fp8", "fp4"), errors(0.0))
    frozen = LinearStatistics("decoder.layers.8.mlp.linear_fc1", 0, 128, 128, 1.0, formats=measured)
    found = divergences(*two(), frozen, formats=("fp8", "fp4"))
    *_, unseen = found.linears.values()
    assert (unseen[FP8].quality_loss, unseen[FP4].quality_loss) == (0.0, None)
    (record,) = caplog.records
    assert "no backward reached 1 of 3 linears, such as decoder.layers.8" in record.getMessage()
    costs = planning_problem(found, target=0.5).linears[-1].options
    assert {costs["fp8"].scores[name] for name in ("norms", *NORMS)} == {0.0}
    assert {costs["fp4"].scores[name] for name in ("norms", *NORMS)} == {None}
    assert (costs["fp8"].quality_loss, costs["fp4"].quality_loss) == (0.0, None)
    divergences(*two(), frozen, formats=("fp8", "fp4"))  # the next refresh says it no more
    assert caplog.records == [record]


@pytest.mark.parametrize(
    ("job", "pin", "kept"),
    [
        (FP8, None, FP8),
        (BF16, None, BF16),
        (FP8, FP4, FP4),
        (Option.parse("fp8-bf16-bf16"), None, Option.parse("fp8-bf16-bf16")),
    ],
)
def test_a_linear_that_no_backward_reached_runs_as_the_job_does(
    job: Option, pin: Option | None, kept: Option
) -> None:
    """Unless it is pinned; also if the run's options do not have the job's."""
    unseen = LinearStatistics("decoder.layers.8.mlp.linear_fc1", 0, 128, 128, 1.0)
    options = enumerate_options(("bf16", "fp8", "fp4"), "linear")
    config = SnipConfig(formats="bf16,fp8,fp4")
    fixed = {} if pin is None else {unseen.name: Fixed(pin, Source.PIN)}
    rows = table(*two(), unseen)
    found = divergence_table(rows, options, "fp4", config, fixed=fixed, job={unseen.name: job})
    costs = planning_problem(found, target=0.5).linears[-1].options
    assert [name for name, cost in costs.items() if cost.quality_loss == 0.0] == [str(kept)]


@pytest.mark.parametrize(
    ("fixed", "refused", "kept"),
    [(None, (), BF16), (FP4, (), FP4), (None, (BF16,), FP8), (None, (BF16, FP8), FP4)],
)
def test_it_keeps_the_option_that_it_is_fixed_to_or_the_highest_that_it_can_run(
    fixed: Option | None, refused: tuple[Option, ...], kept: Option
) -> None:
    """Else the planner would have no option for it, and no refresh would make a plan."""
    name = "decoder.layers.8.mlp.linear_fc1"
    refusals = {option: {name: "weights are stored in FP8"} for option in refused}
    formats = ("bf16", "fp8", "fp4")
    frozen = LinearStatistics(name, 0, 128, 128, 1.0)
    of_linear = {} if fixed is None else {name: Fixed(fixed, Source.FILE)}
    found = divergences(*two(), frozen, formats=formats, refusals=refusals, fixed=of_linear)
    losses = {option: found.linears[name][option].quality_loss for option in (BF16, FP8, FP4)}
    assert losses == dict.fromkeys(losses) | {kept: 0.0}


def test_of_options_per_gemm_it_keeps_the_one_with_the_most_bits() -> None:
    """They are sorted by fprop's bits first: fp8-fp4-fp4 stands before fp4-fp8-fp8."""
    name = "decoder.layers.8.mlp.linear_fc1"
    allowed = ("fp8-fp4-fp4", "fp4-fp8-fp8")
    every = enumerate_options(("fp8", "fp4"), "gemm")
    refusals = {option: {name: "refused"} for option in every if str(option) not in allowed}
    frozen = LinearStatistics(name, 0, 128, 128, 1.0)
    found = divergences(
        *two(), frozen, formats=("fp8", "fp4"), granularity="gemm", refusals=refusals
    )
    kept = [str(o) for o, each in found.linears[name].items() if each.quality_loss is not None]
    assert kept == ["fp4-fp8-fp8"]


def test_where_nothing_is_hurt_or_measured_everything_is_free() -> None:
    rows = [linear(i, fp8=errors(0.0), fp4=errors(0.0)) for i in range(2)]
    found = divergences(*rows, formats=("bf16", "fp8", "fp4"))
    values = [d.quality_loss for row in found.linears.values() for d in row.values()]
    assert values == [0.0] * 6
    info = LinearInfo("decoder.layers.0.mlp.linear_fc2", 3, 512, 256, 6.0 * 512 * 256)
    (row,) = unmeasured_problem([info], [FP8, FP4], "fp4", 0.5).linears
    assert (row.name, row.stage, row.flops) == (info.name, 3, info.flops_per_token)
    assert [option.quality_loss for option in row.options.values()] == [0.0, 0.0]


@pytest.mark.parametrize("granularity", ["linear", "gemm"])
def test_the_planner_accepts_the_problem(granularity: Any) -> None:
    rows = two()
    rows[0] = linear(0, fp8=errors(1.0), fp4=errors(16.0, input_error_square=math.nan))
    found = divergences(*rows, granularity=granularity)
    problem = planning_problem(found, target=0.75)
    assert PlanningProblem.from_dict(json.loads("".join(problem.json_lines()))) == problem
    assert problem.names == tuple(row.name for row in rows)
    assert [row.stage for row in problem.linears] == [0, 1]
    first = problem.linears[0].options
    assert list(first) == list(map(str, enumerate_options(("fp8", "fp4"), granularity)))
    assert first["fp4"].quality_loss is None
    assert (first["fp8"].saving, first["fp4"].saving) == (0.0, 1.0)
    if granularity == "gemm":
        assert first["fp4-fp8-fp4"].saving == pytest.approx(2 / 3)
    scores = problem.linears[1].options["fp8"].scores
    wanted = {"abs_error": 14.0, "rel_error": 1.2, "norms": 1200.0}
    assert scores == pytest.approx(wanted | dict.fromkeys(NORMS, 400.0))


def test_the_record_holds_divergences_and_statistics_without_nan() -> None:
    rows = [linear(0, fp8=errors(1.0), fp4=errors(16.0, input_error_square=math.nan))]
    found = divergences_dict(divergences(*rows, warn=False))
    again = json.loads(json.dumps(found, allow_nan=False))
    assert (again["version"], again["iteration"], again["loss"]) == (3, 30, 2.5)
    (row,) = again["linears"]
    assert row["options"]["fp4"]["loss_divergence"] is None
    assert row["options"]["fp8"]["weight_divergence"] == pytest.approx(2 * BOUND)
    assert row["options"]["fp4"]["quality_loss"] is None
    assert row["statistics"]["formats"]["fp4"]["input_error_square"] is None
    assert row["statistics"]["formats"]["fp8"]["input_error_square"] == 1


def test_of_formats_with_as_few_bits_the_first_is_the_lowest() -> None:
    rows = [
        linear(i, fp8=errors(1.0), fp4=errors(4.0 + i), mxfp4=errors(2.0), nvfp4=errors(3.0))
        for i in (0, 1)
    ]
    found = divergences(*rows, formats=("fp8", "fp4", "mxfp4", "nvfp4"))
    assert found.of_lowest() == [row[FP4] for row in found.linears.values()]
    mixed = Option.parse("fp8-fp4-fp4")
    by_gemm = divergence_table(table(*rows), (mixed,), "fp4", SnipConfig())
    assert by_gemm.of_lowest() == [row[mixed] for row in by_gemm.linears.values()]
