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
    first_plus_fisher,
    fisher,
    fprop_scale,
    norms_of_fprop,
    norms_of_gradients,
    planning_problem,
    relative_error,
    unmeasured_problem,
    weight_divergence,
)
from megatron_snip.errors import UsageError
from megatron_snip.log import forget_warnings
from megatron_snip.options import Granularity, Option, Refusals, enumerate_options
from megatron_snip.planning.fixed import Fixed, FixedLinears, Source
from megatron_snip.planning.plan import PrecisionPlan
from megatron_snip.planning.planner import make_plan
from megatron_snip.planning.problem import PlanningProblem
from megatron_snip.planning.settings import PlanSettings
from megatron_snip.statistics.records import (
    BASE_COLUMNS,
    FORMAT_COLUMNS,
    PRODUCT_COLUMNS,
    LinearStatistics,
)
from megatron_snip.topology import LinearInfo
from tests.unit.divergence.build import errors, linear, table

FP8, FP4, BF16 = (Option.uniform(name) for name in ("fp8", "fp4", "bf16"))
# fp8: |eX| = 1 of |X| = 10, |eW| = 2 of |W| = 20, |eG| = 0.5 of |G| = 5; fp4: 16 times as much.
X, W, G = 1.0, 2.0, 0.5
NORMS = ("norms_fprop", "norms_dgrad", "norms_wgrad")


def test_only_fprop_s_format_changes_the_loss() -> None:
    assert fisher(linear(), FP8) == 7.0
    assert first_plus_fisher(linear(), FP8) == 2.0 + 7.0
    assert fisher(linear(), Option("fp8", "fp4", "fp4")) == 7.0
    assert fisher(linear(), Option("bf16", "fp4", "fp4")) == 0.0


def test_every_gemm_counts_its_two_operands() -> None:
    assert absolute_error(linear(), FP8) == pytest.approx(2 * (X + W + G))
    assert relative_error(linear(), FP8) == pytest.approx(6 * 0.1)
    mixed = Option("fp4", "bf16", "fp8")
    assert absolute_error(linear(), mixed) == pytest.approx(16 * (X + W) + (G + X))
    assert relative_error(linear(), mixed) == pytest.approx(16 * 0.2 + 0.2)
    assert absolute_error(linear(), BF16) == 0.0
    zeros = LinearStatistics("l", 0, 1, 1, 6.0, formats=linear().formats)
    assert relative_error(zeros, FP8) == 0.0


@pytest.mark.parametrize(
    ("option", "square"),
    [
        ("fp8", 3 * 8 + 8 + 64),
        ("fp8-bf16-bf16", 3 * 8),
        ("bf16-fp8-bf16", 8),
        ("bf16-bf16-fp8", 64),
        ("fp4-fp8-bf16", 3 * 8 * 256 + 8),
        ("bf16", 0),
    ],
)
def test_parts_add_in_squares(option: str, square: float) -> None:
    found = weight_divergence(linear(), Option.parse(option), kappa=3.0)
    assert found == pytest.approx(math.sqrt(square))


@pytest.mark.parametrize(("microbatches", "ratio"), [(1.0, 4.0), (4.0, 8.0), (64.0, 32.0)])
def test_fprop_s_share_grows_with_the_root_of_the_microbatches(
    microbatches: float, ratio: float
) -> None:
    linears = [
        linear(i, microbatches=microbatches, fp4=errors(1.0 + i), fp8=errors(9.0)) for i in range(3)
    ]
    kappa = fprop_scale(linears, "fp4")
    forward = sum(weight_divergence(s, Option("fp4", "bf16", "bf16"), kappa) ** 2 for s in linears)
    wgrad = sum(weight_divergence(s, Option("bf16", "bf16", "fp4"), kappa) ** 2 for s in linears)
    assert forward == pytest.approx(ratio * wgrad)


def test_experts_count_no_microbatch_more_than_once() -> None:
    """Their linears have one microbatch for each expert."""
    dense = [linear(i, microbatches=4.0, fp4=errors(1.0)) for i in range(2)]
    of_experts = [replace(each, microbatches=4.0 * 64) for each in dense]
    kappa = fprop_scale([*dense, *of_experts, *of_experts], "fp4")
    assert kappa == pytest.approx(fprop_scale(dense, "fp4"))


def test_without_a_gradient_nothing_is_scaled() -> None:
    for aligned in (0.0, math.nan):
        assert fprop_scale([linear(0, fp4=errors(1.0, aligned_fisher=aligned))], "fp4") == 0.0


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
    settings = SnipConfig(**{"measure": "products", **config})
    return divergence_table(table(*rows), options, "fp4", settings, refusals, fixed, warn)


def two() -> list[LinearStatistics]:
    return [
        linear(0, fp8=errors(1.0), fp4=errors(16.0)),
        linear(1, stage=1, fp8=errors(2.0), fp4=errors(48.0)),
    ]


def test_the_most_fragile_linears_have_the_largest_quality_loss_in_the_lowest_precision() -> None:
    rows = [linear(i, fp4=errors(size), fp8=errors(9.0)) for i, size in enumerate((3.0, 8.0, 5.0))]
    nan = linear(3, fp4=errors(1.0, fisher=math.nan), fp8=errors(1.0))
    found = divergences(*rows, nan)
    names = [row.name for row in rows]
    assert found.most_fragile(2) == (names[1], names[2])
    assert found.most_fragile(10) == (names[1], names[2], names[0])


def test_q_is_each_part_over_its_sum_under_the_lowest_precision() -> None:
    found = divergences(*two())
    first, second = found.linears.values()
    each = math.sqrt(4 * math.sqrt(2) * 64 + 64 / 8 + 64)
    loss_sum, weight_sum = 7.0 * (16 + 48), each * (16 + 48)
    assert first[FP8].quality_loss == pytest.approx(7 / loss_sum + 0.1 * each / weight_sum)
    assert first[FP4].quality_loss == pytest.approx(1.1 * 16 / 64)
    assert second[FP4].quality_loss == pytest.approx(1.1 * 48 / 64)
    assert first[FP8].loss_divergence == 7.0
    assert first[FP8].weight_divergence == pytest.approx(each)
    assert (found.statistics.iteration, found.statistics.linears[1].stage) == (30, 1)


@pytest.mark.parametrize("weight_lambda", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("loss_divergence", ["fisher", "first_plus_fisher"])
def test_the_uniform_lowest_plan_costs_one_plus_lambda(
    loss_divergence: str, weight_lambda: float
) -> None:
    found = divergences(*two(), loss_divergence=loss_divergence, weight_lambda=weight_lambda)
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
    assert row[FP8].quality_loss == pytest.approx(3 / 5 + 0.1 * 8 / 4)
    assert row[FP4].quality_loss == pytest.approx(1.1)
    for name in ("loss_divergence", "weight_divergence"):
        with pytest.raises(UsageError, match=f"unknown {name} 'our'") as refused:
            check_divergences(SnipConfig(**{name: "our"}))
        assert refused.value.field == name
    check_divergences(SnipConfig(loss_divergence="ours", weight_divergence="bits"))


def test_where_a_plugin_s_divergence_fails_the_option_is_forbidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(linear: LinearStatistics, option: Option) -> float:
        return linear.formats[option.fprop].fisher / (option.bits - 12 or linear.stage)

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


BAD = [{"fisher": math.nan}, {"aligned_fisher": math.inf}, {"local_square": -1e9}]


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
    if "fisher" not in bad:  # what does not count forbids nothing
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
    bad = {pinned: errors(1.0, fisher=math.nan)}
    rows = [linear(0, **{"fp8": errors(1.0), "fp4": errors(16.0), **bad}), *two()[1:]]
    fixed = {rows[0].name: Fixed(Option.uniform(pinned), Source.PIN)}
    problem = planning_problem(divergences(*rows, fixed=fixed), target=0.5)
    settings = PlanSettings(pins=(("*.layers.0.*", pinned),))
    plan = make_plan(problem, settings)
    assert str(plan.linears[rows[0].name]) == pinned
    assert plan.efficiency >= 0.5


NOT_MEASURED = dict.fromkeys(PRODUCT_COLUMNS & {*FORMAT_COLUMNS}, math.nan)


def of_norms(index: int, flops: float = 1.0, **sizes: float) -> LinearStatistics:
    """A linear whose products were not measured; sizes of the errors by format."""
    formats = {name: errors(size, **NOT_MEASURED) for name, size in sizes.items()}
    base = dict.fromkeys(PRODUCT_COLUMNS & {*BASE_COLUMNS}, math.nan)
    return replace(linear(index, **formats), flops_per_token=6.0 * flops, **base)


def test_the_divergences_by_norms_are_the_bounds_of_their_gemms() -> None:
    (row,) = divergences(of_norms(0, fp8=1.0, fp4=16.0), measure="norms").linears.values()
    # |G| (|X| |eW| + |eX| |W|); the terms of all three GEMMs are equal here.
    bound = 5 * (10 * W + X * 20)
    assert row[FP8].loss_divergence == pytest.approx(bound)
    assert row[FP8].weight_divergence == pytest.approx(2 * bound)
    assert row[FP4].quality_loss == pytest.approx(1.01)
    mixed = Option("bf16", "fp4", "fp8")
    assert norms_of_fprop(linear(), mixed) == 0.0
    assert norms_of_gradients(linear(), mixed) == pytest.approx(17 * bound)


def test_products_that_were_not_measured_make_no_option_free() -> None:
    """As 0 they would: an arbitrary plan."""
    rows = [of_norms(i, fp8=1.0, fp4=16.0) for i in range(3)]
    for found in divergences(*rows, warn=False).linears.values():
        assert found[FP4].quality_loss is None
    found = divergences(*rows, loss_divergence="norms", weight_divergence="norms")
    for row in found.linears.values():
        assert 0 < (row[FP8].quality_loss or 0) < (row[FP4].quality_loss or 0)


@pytest.mark.parametrize("target", [0.5, 2 / 3, 0.75, 0.9])
def test_snip_by_norms_lowers_what_norms_gemm_lowers(target: float) -> None:
    """The same GEMMs among linears of equal FLOPs; among others no worse, up to the gap."""
    generator = random.Random(3)

    def plans(rows: Sequence[LinearStatistics]) -> list[PrecisionPlan]:
        found = divergences(*rows, formats=("bf16", "fp4"), granularity="gemm", measure="norms")
        problem = planning_problem(found, target)
        policies = ("snip", "norms-gemm")
        return [make_plan(problem, PlanSettings(policy=each, gap=1e-6)) for each in policies]

    sizes = [math.exp(generator.gauss(0, 1)) for _ in range(20)]
    equal = [of_norms(i, fp4=size) for i, size in enumerate(sizes)]
    snip, norms_gemm = plans(equal)
    assert snip.linears == norms_gemm.linears
    snip, norms_gemm = plans([of_norms(i, 1 + i % 3, fp4=size) for i, size in enumerate(sizes)])
    assert snip.objective is not None and norms_gemm.objective is not None
    assert snip.objective <= norms_gemm.objective * (1 + 1e-6)


@pytest.mark.parametrize("field", ["fisher", "local_square"])
@pytest.mark.parametrize("lowest", [0.0, 1e-320, 1e-250])
def test_a_sum_of_zero_forbids_nothing(field: str, lowest: float) -> None:
    """With one token a microbatch FP4 does not change the direction of an update, and FP8 does."""
    none = {"fisher": 0.0, "aligned_fisher": 0.0, "local_square": 0.0}
    rows = [
        linear(i, fp8=errors(1.0), fp4=errors(16.0, **{**none, field: lowest})) for i in range(4)
    ]
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
    rows[0] = linear(0, fp8=errors(1.0), fp4=errors(16.0, fisher=math.nan))
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
    rows = [linear(0, fp8=errors(1.0), fp4=errors(16.0, fisher=math.nan))]
    found = divergences_dict(divergences(*rows, warn=False))
    again = json.loads(json.dumps(found, allow_nan=False))
    assert (again["version"], again["iteration"], again["loss"]) == (2, 30, 2.5)
    (row,) = again["linears"]
    assert row["options"]["fp4"]["loss_divergence"] is None
    assert row["options"]["fp4"]["weight_divergence"] == pytest.approx(
        16 * math.sqrt(256 * math.sqrt(2) + 72)
    )
    assert row["options"]["fp4"]["quality_loss"] is None
    assert row["statistics"]["formats"]["fp4"]["fisher"] is None
    assert row["statistics"]["formats"]["fp8"]["fisher"] == 7


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
