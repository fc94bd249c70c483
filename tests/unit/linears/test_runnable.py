"""What linears can run: learnt, offered, cut out of problems, mapped, told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron_snip.linears.runnable import (
    Runnable,
    at_least,
    nearest,
    offered,
    restricted,
    told_changes,
)

from megatron_snip.errors import UnsupportedError
from megatron_snip.options import BF16, Option, enumerate_options

FP8, FP4, NVFP4, MXFP8 = map(Option.uniform, ("fp8", "fp4", "nvfp4", "mxfp8"))
A, B, C = (f"decoder.layers.{i}.mlp.linear_fc1" for i in range(3))


class Linear:
    """A linear that refuses some options."""

    def __init__(self, name: str, **refused: str) -> None:
        self.placement: Any = SimpleNamespace(name=name)
        self.refused = refused
        self.asked: list[Option] = []

    def refusal(self, option: Option) -> str | None:
        self.asked.append(option)
        return self.refused.get(str(option).replace("-", "_"))


def runnable(*linears: Linear, learn: tuple[Option, ...] = (FP8, FP4)) -> Runnable:
    result = Runnable(linears, None)
    result.learn(learn)
    return result


def test_an_option_is_learnt_once() -> None:
    linear = Linear(A, fp4="no")
    found = runnable(linear)
    found.learn((FP4, FP4, FP8, NVFP4))
    assert linear.asked == [FP8, FP4, NVFP4]
    assert found.refused(FP4) == {A: "no"}
    assert found.refused(FP8) == {} == found.refused(BF16)


def test_an_option_not_learnt_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        runnable(Linear(A)).refused(NVFP4)


def test_what_every_linear_runs_is_offered_silently() -> None:
    options, warnings = offered(runnable(Linear(A), Linear(B)), (FP8, FP4), [A, B], "fp4")
    assert options == (FP8, FP4)
    assert warnings == []


def test_what_no_linear_runs_is_not_offered() -> None:
    linears = [Linear(name, fp8="needs 9.0") for name in (A, B)]
    options, (warning,) = offered(runnable(*linears), (FP8, FP4), [A, B], "fp4")
    assert options == (FP4,)
    assert warning == "fp8 is not offered to any linear: needs 9.0"


def test_what_some_linears_run_is_offered_with_a_warning() -> None:
    linears = [Linear(A, fp8="shape (5, 7)"), Linear(B, fp8="shape (7, 5)"), Linear(C)]
    options, (warning,) = offered(runnable(*linears), (FP8, FP4), [A, B, C], "fp4")
    assert options == (FP8, FP4)
    assert warning == "fp8 is not offered to 2 linears: shape (5, 7); shape (7, 5)"


def test_reasons_are_shown_once_and_not_endlessly() -> None:
    linears = [Linear(f"{A}{i}", fp8=f"reason {i // 2}") for i in range(10)]
    names = [linear.placement.name for linear in linears]
    _, (warning,) = offered(runnable(*linears), (FP8, FP4), names, "fp4")
    assert warning.endswith("reason 0; reason 1; reason 2 and 2 other reasons")


def test_a_lowest_precision_that_nothing_runs_is_refused() -> None:
    linears = [Linear(A, fp4="NVFP4 GEMMs need 10.0")]
    with pytest.raises(UnsupportedError, match=r"no linear .* fp4.*need 10\.0") as caught:
        offered(runnable(*linears), (FP8, FP4), [A], "fp4")
    assert "--snip-formats" in str(caught.value)


def test_a_mixed_option_alone_still_reaches_the_lowest_precision() -> None:
    mixed = Option.parse("fp4-fp8-fp8")
    found = runnable(Linear(A, fp4="no"), learn=(FP8, FP4, mixed))
    options, _ = offered(found, (FP8, mixed, FP4), [A], "fp4")
    assert options == (FP8, mixed)


def test_problems_list_what_each_linear_runs() -> None:
    found = runnable(Linear(A, fp4="no"), Linear(B, fp4="no", fp8="no"), Linear(C))
    costs = {
        str(o): {"quality_loss": i + 0.5, "saving": float(i)} for i, o in enumerate((FP8, FP4))
    }
    rows = [{"name": name, "flops": 2.0, "options": dict(costs)} for name in (A, B, C)]
    problem = {"target": 0.5, "linears": rows}
    cut = restricted(found, problem)
    assert [list(row["options"]) for row in cut["linears"]] == [["fp8"], ["bf16"], ["fp8", "fp4"]]
    assert cut["linears"][0]["options"]["fp8"] == costs["fp8"]
    assert cut["linears"][1]["options"]["bf16"] == {"quality_loss": 0.0, "saving": 0.0}
    assert cut["target"] == 0.5 and cut["linears"][1]["flops"] == 2.0
    assert [list(row["options"]) for row in rows] == [["fp8", "fp4"]] * 3  # left as it was


def test_plans_from_elsewhere_lose_no_precision() -> None:
    found = runnable(
        Linear(A, fp4="no"), Linear(B), Linear(C, fp4="no", fp8="no"), learn=(FP8, FP4)
    )
    plan = dict.fromkeys((A, B, C), FP4)
    mapped = nearest(found, plan, (BF16, FP8, FP4))
    assert mapped == {A: FP8, B: FP4, C: BF16}
    assert told_changes(found, plan, mapped) == [
        "fp8 in place of fp4 for 1 linear: no",
        "bf16 in place of fp4 for 1 linear: no",
    ]
    assert told_changes(found, plan, plan) == []


BITS = {"bf16": 16, "fp8": 8, "fp4": 4}


def enough(new: Option, old: Option) -> bool:
    return all(BITS[a] >= BITS[b] for a, b in zip(new.formats, old.formats, strict=True))


def total(option: Option) -> int:
    return sum(BITS[name] for name in option.formats)


def test_nearest_is_the_fewest_bits_of_those_with_enough_in_every_gemm() -> None:
    for option in enumerate_options(("bf16", "fp8", "fp4"), "gemm"):
        for candidates in ((FP8,), (BF16, FP8), (Option.parse("fp4-fp8-bf16"), FP8), ()):
            chosen = at_least(option, candidates)
            fits = [other for other in (*candidates, BF16) if enough(other, option)]
            if option in candidates:
                assert chosen == option
            else:
                assert chosen in fits
                assert total(chosen) == min(map(total, fits))
    assert at_least(FP4, (NVFP4, FP4)) == FP4
    assert at_least(FP4, (NVFP4, MXFP8)) == NVFP4
    assert at_least(MXFP8, (FP8, BF16)) == FP8
