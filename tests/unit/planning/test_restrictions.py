"""What linears cannot run, and the options that stand in for it."""

from megatron_snip.options import BF16, Option
from megatron_snip.planning.restrictions import nearest_option, restrict_problem
from tests.unit.planning.build import name_of, problem_of

FP8, FP4, NVFP4, MXFP8 = map(Option.uniform, ("fp8", "fp4", "nvfp4", "mxfp8"))
A, B, C = map(name_of, range(3))
PROBLEM = problem_of([[0.0, 0.0]] * 3, 0.5, stages=[0, 1, 1], flops=[1.0, 1.0, 2.0])


def test_the_nearest_option_has_the_fewest_bits_with_enough_in_every_gemm() -> None:
    mixed, forward = Option.parse("fp4-fp8-bf16"), Option.parse("fp8-fp4-fp4")
    for option, candidates, wanted in (
        (FP4, (NVFP4, FP4), FP4),
        (FP4, (NVFP4, MXFP8), NVFP4),
        (MXFP8, (FP8, BF16), FP8),
        (FP4, (BF16, mixed, FP8), FP8),  # 24 bits, `mixed` has 28
        (mixed, (FP8,), BF16),
        (forward, (FP4, mixed, FP8), FP8),
        (FP4, (FP8, forward), forward),
        (FP8, (), BF16),
    ):
        assert nearest_option(option, candidates) == wanted


def test_a_restricted_problem_lists_what_each_linear_runs() -> None:
    problem = restrict_problem(PROBLEM, {FP4: {A: "no", B: "no"}, FP8: {B: "no"}})
    assert [list(row.options) for row in problem.linears] == [["fp8"], ["bf16"], ["fp8", "fp4"]]
    assert problem.linears[0].options["fp8"] == PROBLEM.linears[0].options["fp8"]
    bf16 = problem.linears[1].options["bf16"]
    assert (bf16.quality_loss, bf16.saving) == (0.0, 0.0)
    assert [row.flops for row in problem.linears] == [1.0, 1.0, 2.0]
    assert restrict_problem(PROBLEM, {}) == PROBLEM
