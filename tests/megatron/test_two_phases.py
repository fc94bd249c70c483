"""Measure first, train later (docs/two-phases.md): a short job, a plan, a long job without SNIP."""

from pathlib import Path

import pytest

from megatron_snip.__main__ import main
from megatron_snip.planning.plan import read_plan
from tests.megatron.lab import COLLECT_ONLY, SNIP, Lab, logged

FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8", "--mamba-head-dim", "4"]
STORED = ["--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"]
FORMATS = ["--snip-formats", "bf16,fp8"]
SHORT = ["--train-iters", "4", "--clip-grad", "0"]
"""The norm of all gradients is added up in the order of buckets, and stored weights have others."""
LAYOUT = "one hybrid"
"""Megatron 0.19 passes names to the linears of hybrid models alone, and stores weights by them."""


@pytest.fixture(scope="module")
def files(te_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The static plan, and Megatron's precision file that was exported from it."""
    folder = tmp_path_factory.mktemp("static")
    plan, precision = folder / "static.json", folder / "precision.yaml"
    measured = te_lab.run(LAYOUT, [*FP8, *SHORT, *COLLECT_ONLY, *FORMATS])
    measured.finished()
    problem = measured.output / "problems" / "3.json"
    assert main(["plan", str(problem), "--target", "0.5", "--output", str(plan)]) == 0
    export = ["export", str(plan), "--capability", "10.0", "--fp8-recipe", "mxfp8", "--fp8-param"]
    assert main([*export, "--output", str(precision)]) == 0
    return plan, precision


def test_the_long_job_trains_as_under_snip_and_stores_what_the_file_says(
    te_lab: Lab, files: tuple[Path, Path]
) -> None:
    plan, precision = files
    words = [*FP8, *STORED, *SHORT, "--te-precision-config-file", str(precision)]
    static = te_lab.run(LAYOUT, words, plain=True)
    planned = [*SNIP, *FORMATS, "--snip-plan-file", str(plan)]
    under_snip = te_lab.run(LAYOUT, [*FP8, *SHORT, *planned])
    assert logged(static) == logged(under_snip)
    options = {name: str(option) for name, option in read_plan(plan).linears.items()}
    assert set(options.values()) == {"bf16", "fp8"}
    (result,) = static.finished()
    stored = {name.removesuffix(".weight") for name in result["quantized"]}
    assert stored == {name for name, option in options.items() if option == "fp8"}
