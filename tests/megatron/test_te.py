"""Plans on Transformer Engine's linears: its own Python, as on Blackwell, through `pretrain`."""

import pytest

from tests.megatron.lab import SNIP, Lab, applied_plans, logged, recipes_of, saving, weights


@pytest.mark.parametrize("layout", ["te", "te tp2"])
def test_a_run_measures_plans_and_trains_on(te_lab: Lab, layout: str) -> None:
    plain = te_lab.run(layout, plain=True)
    run = te_lab.run(layout, SNIP)
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    before, after = logged(plain), logged(run)
    assert [after[i] for i in range(1, 5)] == [before[i] for i in range(1, 5)]
    assert after[5] != before[5]
    recipes = recipes_of(run.output, 5)
    assert {"nvfp4"} < set(recipes.values()) <= {"bf16", "mxfp8", "nvfp4"}
    assert len(recipes) == 16


@pytest.mark.parametrize(
    ("name", "target", "recipe"),
    [
        ("fp8-forward-fp4-backward", "0.5", "custom(mxfp8, nvfp4, nvfp4)"),
        ("fp4-forward-mxfp8-backward", "0.25", "custom(nvfp4, mxfp8, mxfp8)"),
    ],
)
def test_a_mixed_option_trains_by_its_name(
    te_lab: Lab, name: str, target: str, recipe: str
) -> None:
    """With the default target, which is a share of what the option can lower."""
    end = SNIP.index("--snip-efficiency-target")
    run = te_lab.run("te", [*SNIP[:end], *SNIP[end + 2 :], "--snip-formats", f"fp8,{name}"])
    run.finished()
    assert applied_plans(run) == [5, 9], run.report
    assert f"the efficiency target is {target}, 0.75 of the " in run.logs[0]
    assert set(recipes_of(run.output, 5).values()) == {"mxfp8", recipe}


def test_what_is_measured_only_changes_no_bit(te_lab: Lab) -> None:
    plain = te_lab.run("te tp2", plain=True)
    measured = te_lab.run("te tp2", [*SNIP, "--snip-collect-only"])
    assert weights(measured) == weights(plain)
    assert [r["losses"] for r in measured.finished()] == [r["losses"] for r in plain.finished()]


@pytest.mark.parametrize("layout", ["te", "te tp2"])
def test_a_killed_run_resumes_bitwise(te_lab: Lab, layout: str) -> None:
    output = te_lab.output(f"whole-{layout.replace(' ', '-')}")
    uninterrupted = te_lab.run(layout, [*SNIP, *saving(output)])
    folder = te_lab.output(f"killed-{layout.replace(' ', '-')}")
    killed = te_lab.run(layout, [*SNIP, *saving(folder)], {"TINY_KILL_AFTER": "7"})
    assert all(status != 0 for status in killed.statuses), killed.report
    again = te_lab.run(layout, [*SNIP, "--load", str(folder)])
    assert weights(again) == weights(uninterrupted)
    assert applied_plans(again) == [9]
    norms = logged(uninterrupted, "grad norm")
    assert logged(again, "grad norm") == {i: norm for i, norm in norms.items() if i > 7}
