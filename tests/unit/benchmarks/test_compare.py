"""The comparison of policies: equal shares, shares at equal loss, remembered random numbers."""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.compare import analysis, curve, estimated, figure, policies, runs, times
from benchmarks.compare.__main__ import FILES, fill_page, main
from benchmarks.compare.forks import Fit
from benchmarks.compare.store import ResultStore
from benchmarks.compare.variants import AT_TAG, Formats, Plan, Planner, low_items, problems_of
from megatron_snip.errors import UsageError
from megatron_snip.options import Granularity, Option, enumerate_options
from megatron_snip.planning.problem import LinearChoices, OptionCost, PlanningProblem
from megatron_snip.quantizers.stochastic import StochasticStream, StreamKey
from megatron_snip.statistics.records import StatisticsTable
from megatron_snip.types import Gemm
from tests.unit.divergence.build import errors, linear, table

FORMATS = Formats("fp4")
KINDS = {
    "self_attention.linear_qkv": 3,
    "self_attention.linear_proj": 1,
    "mlp.linear_fc1": 6,
    "mlp.linear_fc2": 3,
}
SIZES = {f"decoder.layers.{k}.{kind}": size for k in range(4) for kind, size in KINDS.items()}


@pytest.fixture(scope="module")
def planner() -> Planner:
    rng = np.random.default_rng(3)
    costs = {(name, gemm): float(rng.uniform()) for name in SIZES for gemm in Gemm}

    def choice(name: str, option: Option) -> OptionCost:
        loss = sum(costs[name, gemm] for gemm in Gemm if option[gemm] == "fp4")
        return OptionCost(quality_loss=loss, saving=option.share_in("fp4"), scores={"norms": loss})

    def problem(granularity: Granularity) -> PlanningProblem:
        options = enumerate_options(("fp8", "fp4"), granularity)
        return PlanningProblem(
            linears=tuple(
                LinearChoices(
                    name=name,
                    stage=0,
                    flops=3.0 * size,
                    options={str(option): choice(name, option) for option in options},
                )
                for name, size in SIZES.items()
            ),
            target=0.0,
        )

    linear, gemm = problem("linear"), problem("gemm")
    problems = {"linear": linear, "gemm": gemm, "snip-linear": linear, "snip-gemm": gemm}
    return Planner(problems, FORMATS, seed=1)


@pytest.mark.parametrize("variant", curve.VARIANTS)
@pytest.mark.parametrize("target", curve.TARGETS)
def test_all_variants_have_the_same_share(planner: Planner, variant: str, target: float) -> None:
    share = planner.equal_share(target)
    assert abs(share - target) <= 0.5 / sum(SIZES.values()) + 1e-12
    plan = planner.plan(variant, target)
    if variant == "snip-linear":  # its best plan may exceed the target
        assert planner.share(plan) >= share - 1e-12
    else:
        assert planner.share(plan) == pytest.approx(share, abs=1e-12)


def test_a_rule_skips_only_what_does_not_fit(planner: Planner) -> None:
    units = round(planner.equal_share(0.85) * sum(SIZES.values()) * 3)
    wanted = {(name, gemm) for name in SIZES for gemm in (Gemm.DGRAD, Gemm.WGRAD)}
    left = units - 2 * sum(SIZES.values())
    for layer in (1, 2, 0, 3):  # from the middle outwards, in Megatron's order of names
        kinds = ("mlp.linear_fc1", "mlp.linear_fc2", *sorted(KINDS)[2:])
        for name in (f"decoder.layers.{layer}.{kind}" for kind in kinds):
            if SIZES[name] <= left:
                left -= SIZES[name]
                wanted.add((name, Gemm.FPROP))
    assert left == 0
    plan = planner.plan("grads-first", 0.85)
    assert low_items(plan, FORMATS) == wanted


def test_share_at_equal_loss() -> None:
    shares = [0.5, 0.6, 0.7, 0.8]
    assert curve.share_at(shares, [1.0, 2.0, 4.0, 8.0], 3.0) == pytest.approx(0.65)
    assert curve.share_at(shares, [1.0, 2.0, 4.0, 8.0], 8.0) == pytest.approx(0.8)
    # 4 and 2 are pooled to 3, so 2 lies half way to them.
    assert curve.share_at(shares, [1.0, 4.0, 2.0, 8.0], 2.0) == pytest.approx(0.55)
    assert curve.share_at(shares, [1.0, 2.0, 4.0, 8.0], 9.0) == 0.8
    assert curve.share_at(shares, [1.0, 2.0, 4.0, 8.0], 0.1) == 0.5
    seeds = [(seed, 0) for seed in range(4)]
    snip = {share: dict.fromkeys(seeds, 10 * share) for share in shares}
    rule = {0.5: dict.fromkeys(seeds, 6.0)}
    assert curve.more_at_equal_loss(snip, rule, 0.5) == pytest.approx((20.0, 20.0, 20.0))
    assert curve.more_at_equal_loss({0.5: snip[0.5]}, rule, 0.5) is None
    assert curve.more_at_equal_loss({0.5: {(9, 0): 1.0}}, rule, 0.5) is None
    # A curve that begins at the rule's share, above the rule's gap.
    assert curve.more_at_equal_loss(snip, {0.5: dict.fromkeys(seeds, 4.0)}, 0.5) == (0, 0, 0)


def test_an_interval_that_ends_where_the_curve_begins_says_so() -> None:
    rows = []
    for seed, rule_gap in ((0, 1.0), (1, 6.0), (2, 6.0)):
        place = {**PLACE, "seed": seed, "loss_bf16": 2.0}
        rows.append({**place, "variant": "bf16", "target": 0.0, "share": 0.0, "loss": 2.0})
        for variant, target, gap in (
            ("snip-gemm", 0.85, 4.0),
            ("snip-gemm", 0.95, 8.0),
            ("grads-first", 0.85, rule_gap),
        ):
            found = {"target": target, "share": target, "loss": 2.0 + gap / 1e3}
            rows.append({**place, "variant": variant, **found})
    assert "% [≤ 0, +" in curve.summary(rows)


def test_seeds_that_repeat_the_preregistered_difference_are_not_of_it() -> None:
    rows = []
    for seed in (5, 6):
        place = {**PLACE, "seed": seed, "loss_bf16": 2.0}
        rows.append({**place, "variant": "bf16", "target": 0.0, "share": 0.0, "loss": 2.0})
        for target in curve.PRIMARY_TARGETS:
            for variant, gap in (("snip-gemm", 1.0), ("grads-first", seed)):
                found = {"target": target, "share": target, "loss": 2.0 + gap / 1e3}
                rows.append({**place, "variant": variant, **found})
    table = curve.table(rows)
    assert (
        "- in the plan's precision: grads-first - snip-gemm, mean of (0.85, 0.9, 0.95): +4.0"
        in table
    )
    assert "- the repetition, in the plan's precision: grads-first - snip-gemm" in table
    assert "+5.00)" in table


def test_remembered_random_numbers_are_those_drawn_anew() -> None:
    for iteration in (1, 2):
        plain = StochasticStream(StreamKey(0, "fc1", iteration, 0))
        for _ in range(2):  # drawn, then remembered
            remembered = runs._RememberedStream(plain.key, plain.columns)
            for gemm in (Gemm.DGRAD, Gemm.WGRAD):
                found = remembered.for_gemm(gemm).bits16(16, 24)
                assert torch.equal(found, plain.for_gemm(gemm).bits16(16, 24))


PLACE = {"kind": "policies", "setup": "s", "scenario": "p", "low": "fp4", "data_seed": 0}


def test_a_row_is_found_by_its_target(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "rows.jsonl")
    key = {**PLACE, "seed": 0, "variant": "norms"}
    store.add({**key, "target": 0.9, "loss": 1.0})
    again = ResultStore(tmp_path / "rows.jsonl")
    assert again.has({**key, "target": 0.9})
    assert not again.has({**key, "target": 0.8}) and not again.has(key)


def test_rows_of_two_warm_models_are_not_mixed(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "rows.jsonl")
    store.add({**PLACE, "seed": 0, "variant": "bf16", "target": 0.0, "start": "a", "loss": 1.0})
    store.check_start({**PLACE, "seed": 0}, "a")
    store.check_start({**PLACE, "seed": 1}, "b")
    with pytest.raises(UsageError, match="another warm model"):
        store.check_start({**PLACE, "seed": 0}, "b")


def test_the_table_and_the_figure_of_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gaps grow with the share, in seed 0 with slopes 10 and 12, in each next seed by 1 more."""
    monkeypatch.setattr(curve, "DRAWS", 50)
    slopes = {"snip-gemm": 10.0, "grads-first": 12.0}
    rows = []
    for seed in range(3):
        losses = {"loss": 2.0 + seed, "loss_bf16": 2.0 + seed}
        rows.append({**PLACE, "seed": seed, "variant": "bf16", "target": 0.0, **losses})
        for variant, slope in slopes.items():
            for target in (0.8, 0.85, 0.9, 0.95):
                gap = (slope + seed) * target
                found = {"loss": losses["loss"] + gap / 1e3, "loss_bf16": losses["loss"]}
                row = {**PLACE, "seed": seed, "variant": variant, "target": target, **found}
                rows.append({**row, "share": target})
    lines = curve.table(rows).splitlines()
    assert lines[0] == "| fp4, s model, 3 seeds | 80.0 % | 85.0 % | 90.0 % | 95.0 % |"
    assert lines[2].startswith("| snip-gemm | +8.8 ± 2.0 / +0.0 ± 0.0 (3) |")
    assert lines[4].startswith("| grads-first - snip-gemm | +1.6 ± 0.0, p < 0.001 / ")
    # On average the slopes are 11 and 13: 13 * 0.8 is 11 * 0.945, and 13 * 0.85 is beyond 95 %.
    assert lines[5].split("|")[2].startswith(" +18.2 % [")
    assert lines[5].split("|")[3].startswith(" not reached")
    more = curve.more_at_equal_loss(*curve.curves(rows).values(), 0.8)
    assert more is not None
    for line, gpu in zip(lines[6:8], times.GPUS, strict=True):
        saved = times.percent_saved(gpu, 0.8, more[0])
        assert line.endswith(f"{gpu.name} | {saved:.1f} % |  |  |  |")
    assert "mean of (0.85, 0.9, 0.95): +1.8 ± 0.0" in lines[9]
    head, _, *short = curve.summary(rows).splitlines()
    assert head.startswith("| share of FLOPs | seeds | `snip-gemm` | `grads-first` |")
    assert short[0].startswith("| 80.0 % | 3 | +8.8 ± 2.0 | +10.4 ± 2.0 | +1.6 ± 0.0, p < 0.001 |")
    assert [line.split("|")[7].split(" [")[0].strip() for line in short[:2]] == [
        "+18.2 %",
        "not reached",
    ]
    figure.draw(rows, {}, tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text().startswith("<?xml")


def test_variants_of_a_target_are_compared_although_their_shares_differ_a_little() -> None:
    rows = [
        {**PLACE, "seed": 0, "loss_bf16": 2.0, "variant": name, "target": target, **found}
        for name, target, found in (
            ("bf16", 0.0, {"share": 0.0, "loss": 2.0}),
            ("snip-gemm", 0.9, {"share": 0.902, "loss": 2.01}),
            ("grads-first", 0.9, {"share": 0.9, "loss": 2.02}),
        )
    ]
    assert [list(found) for found in curve.curves(rows).values()] == [[0.901], [0.901]]


def test_a_line_of_the_short_table_is_of_the_seeds_that_both_have() -> None:
    rows = []
    for seed, variant, gap in (
        (0, "snip-gemm", 10.0),
        (1, "snip-gemm", 90.0),
        (0, "grads-first", 30.0),
    ):
        place = {**PLACE, "seed": seed, "loss_bf16": 2.0}
        found = {"target": 0.9, "share": 0.9, "loss": 2.0 + gap / 1e3}
        rows.append({**place, "variant": "bf16", "target": 0.0, "share": 0.0, "loss": 2.0})
        rows.append({**place, "variant": variant, **found})
    assert "| 90.0 % | 1 | +10.0 | +30.0 | +20.0 |" in curve.summary(rows)


def test_tables_are_written_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    head = "before\n\n<!-- table --page: fp4 s -->\n"
    page.write_text(f"{head}old\n<!-- end -->\nafter\n")
    rows = []
    for variant, loss in {"bf16": 1.0, "snip-gemm": 1.1, "grads-first": 1.3}.items():
        row = {**PLACE, "seed": 0, "variant": variant, "target": 0.9, "share": 0.9}
        rows.append({**row, "loss": loss, "loss_bf16": loss})
    rows[0]["target"] = 0.0
    fill_page(page, [rows])
    text = page.read_text()
    assert text == f"{head}\n{curve.summary(rows)}\n\n<!-- end -->\nafter\n"
    assert "| 90.0 % | 1 | +100.0 | +300.0 | +200.0 | +200.0 |" in text
    fill_page(page, [rows])
    assert page.read_text() == text
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="NAME is one of all, fp4 s"):
        fill_page(page, [rows])


def test_plans_that_follow_the_run_are_compared_with_their_own_rivals() -> None:
    """At one target: there is no share of equal loss, and no mean of targets."""
    gaps = {"snip-gemm": 5.0, "replan": 4.0, "heal-plan": 2.0, "heal-grads-first": 3.5}
    rows = []
    for seed in range(2):
        losses = {"loss": 2.0, "loss_bf16": 2.0}
        rows.append({**PLACE, "seed": seed, "variant": "bf16", "target": 0.0, **losses})
        for variant, gap in gaps.items():
            found = {"loss": 2.0 + (gap + seed) / 1e3, "loss_bf16": 2.0, "share": 0.9}
            rows.append({**PLACE, "seed": seed, "variant": variant, "target": 0.9, **found})
    head, _, *lines = curve.table(rows).splitlines()
    assert head == "| fp4, s model, 2 seeds | 90.0 % |"
    differences = [line for line in lines if " - " in line]
    assert len(lines) == len(gaps) + len(differences)
    assert differences[0].startswith("| snip-gemm - replan | +1.0 ± 0.0")
    assert differences[1].startswith("| heal-grads-first - heal-plan | +1.5 ± 0.0")


def test_predicted_times_follow_the_share_and_stay_between_the_two_formats() -> None:
    for gpu in times.GPUS:
        ends = times.linears_seconds(gpu, gpu.high), times.linears_seconds(gpu, gpu.low)
        assert times.seconds(gpu, 0.0) == ends[0] > ends[1] == pytest.approx(times.seconds(gpu, 1))
        # Compute alone is exactly twice as fast; quantization and memory take a part of that.
        assert ends[1] > ends[0] * gpu.flops[gpu.high] / gpu.flops[gpu.low]
        assert times.percent_saved(gpu, 0.9, 2.0) > times.percent_saved(gpu, 0.9, 1.0) > 0
        assert times.percent_saved(gpu, 0.9, 50.0) == times.percent_saved(gpu, 0.9, 100 / 9)


def test_plans_from_norms_lower_gradients_first_and_then_the_least_bounds_of_fprop() -> None:
    """The bounds of gradient GEMMs are larger than those of fprop, and in the opposite order."""
    names = [f"decoder.layers.{k}.mlp.linear_fc1" for k in range(6)]
    items = [(name, gemm) for name in names for gemm in Gemm]
    bounds = [1.0 + k if gemm == Gemm.FPROP else 90.0 - 9 * k for k in range(6) for gemm in Gemm]
    num = len(items)
    costs = analysis.Costs(np.ones(num), np.eye(num), 1.0, 1.0)
    scores = {"norms": bounds, "snip": bounds[::-1]}
    nothing = np.zeros(0)
    fit = Fit(items, np.ones(num), scores, costs, nothing, nothing, nothing)
    losses = estimated.norms_losses(fit)
    fprop = np.array([gemm == Gemm.FPROP for _, gemm in items])
    assert losses[fprop] == pytest.approx(np.arange(1, 7) / 21)
    assert losses[~fprop].sum() == pytest.approx(0.01)
    found = estimated.estimate(fit, "fp4", (0.5, 5 / 6))
    assert set(found.low) == set(estimated.ESTIMATED)
    half, more = (
        {name: low[share].astype(bool) for name, low in found.low.items()} for share in (0.5, 5 / 6)
    )
    assert (more["norms-q-gemm"] == (~fprop | (np.arange(num) < 9))).all()
    assert (more["norms-q-gemm"] == more["norms-gemm"]).all()
    assert (more["norms-q-gemm"] != more["snip-gemm"]).any()
    assert (half["norms-q-linear"] == (np.arange(num) < 9)).all()
    assert (half["norms"] == (np.arange(num) >= 9)).all()
    # The two plans differ in all 18 GEMMs, and each cost has an error of 1.
    assert "| norms-q-linear - norms | +0.0 ± 4.2 |" in estimated.estimate_table(found)


def test_the_problems_of_norms_have_the_quality_loss_of_the_setting() -> None:
    problems = problems_of(table(linear(0), linear(1)), FORMATS)
    for variant in ("norms-q-linear", "norms-q-gemm"):
        options = problems[variant].linears[0].options
        assert options["fp4"].quality_loss == pytest.approx(1.01 / 2)
    assert options["fp8-fp4-fp4"].quality_loss == pytest.approx((1 / 16 + 0.01) / 2)


class FakeModel:
    """A warm model whose branches take no time."""

    digest = "a"

    def __init__(self) -> None:
        self.trained: list[Plan] = []

    def measure(self, formats: tuple[str, ...]) -> StatisticsTable:
        high, low = formats
        rows = (linear(k, **{high: errors(1.0 + k), low: errors(16.0 - k)}) for k in range(4))
        return table(*rows)

    def branch(self, plan: Plan) -> dict[str, Any]:
        self.trained.append(plan)
        loss = 2.0 + len(self.trained) / 64
        return {"loss": loss, "loss_bf16": loss, "training_loss": loss, "quarters": [], "tokens": 1}


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Of a comparison of SNIP with rules, on a warm model that takes no time."""
    monkeypatch.setattr(policies, "warm_model", lambda *_: nullcontext(FakeModel()))
    variants = ("norms-q-gemm", "norms-gemm", "norms-q-linear", "grads-first")
    return argparse.Namespace(
        setup="quick", scenario="plain", targets=(0.5, 0.75), variants=variants
    )


def test_equal_plans_are_trained_once_and_rows_are_found_again(
    tmp_path: Path, options: argparse.Namespace
) -> None:
    path = tmp_path / "rows.jsonl"
    policies.run_policies(ResultStore(path), options, "fp4", 0)
    rows = ResultStore(path).rows
    branches = [("bf16", 0.0), *((v, t) for t in options.targets for v in options.variants)]
    assert [(row["variant"], row["target"]) for row in rows] == branches
    by_plan = {row["plan"]: row["loss"] for row in reversed(rows)}
    assert len(by_plan) < len(rows)
    assert all(row["loss"] == by_plan[row["plan"]] for row in rows)
    assert sum("equal_to" not in row for row in rows) == len(by_plan)
    shares = {row["target"]: row["share"] for row in rows if row["variant"] == "grads-first"}
    assert all(row["share"] == shares.get(row["target"], 0.0) for row in rows)
    first = path.read_text()
    policies.run_policies(ResultStore(path), options, "fp4", 0)
    assert path.read_text() == first


@pytest.mark.parametrize("variant", AT_TAG)
def test_rows_with_plans_from_products_are_not_made(
    tmp_path: Path, options: argparse.Namespace, variant: str
) -> None:
    """Else a plan from norms would stand beside the committed rows under the same name."""
    path = tmp_path / "rows.jsonl"
    options.variants = (variant,)
    with pytest.raises(UsageError, match=f"{variant}.* check out the tag products-last"):
        policies.run_policies(ResultStore(path), options, "fp4", 0)
    assert not path.exists()


@pytest.mark.parametrize("command", sorted(set(FILES) - {"policies", "collapse"}))
def test_commands_that_make_no_rows_refuse_hours(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["compare", command, "--results", str(tmp_path / "rows.jsonl"), "--hours"]
    monkeypatch.setattr(sys, "argv", [*words, "3"])
    with pytest.raises(SystemExit, match="git checkout products-last"):
        main()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("rival", "verdict: equal"),
        ("collapse", "13 of 13 cells; hardest: one-scale"),
        ("kinds", "KIND_WEIGHTS: fprop 1"),
    ],
)
def test_committed_rows_are_printed(
    command: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", command, "--hours", "0"])
    main()
    assert shown in capsys.readouterr().out
