"""What the benchmark of a job makes of Megatron's log."""

import pytest

from benchmarks.gpu import FIRST
from benchmarks.job import FIRST_MEASURED, cases, compare, is_wanted, skipped

NUM_ITERATIONS = 32


def case(ordinary_ms: float, measured_ms: float | None, loss: str = "9.1") -> dict[str, object]:
    times = [1000.0 + ordinary_ms] + [ordinary_ms] * (NUM_ITERATIONS - 1)
    if measured_ms is not None:
        for i in range(FIRST_MEASURED - 1, NUM_ITERATIONS, 2):
            times[i] = measured_ms
    losses = [[loss, "2.0"]] * NUM_ITERATIONS
    return {"milliseconds": times, "losses": losses, "peak_mib": 2048.0, "plans": []}


@pytest.mark.parametrize("loss", ["9.1", "9.2"])
def test_a_measured_job_is_compared_with_the_same_job_without_snip(loss: str) -> None:
    found = compare(
        {
            "bf16, off": case(100.0, None),
            "fp8 delayed, off": case(80.0, None),
            "fp8 delayed, measured": case(88.0, 176.0, loss),
            "bf16, all fp8": case(90.0, None),
        }
    )
    measured = found["fp8 delayed, measured"]
    assert (measured["iteration_ms"], measured["measured_ms"]) == (88.0, 176.0)
    assert measured["measured_ratio"] == 2.0 and measured["installed_ratio"] == 1.1
    assert measured["over_bf16"] == 0.88 and measured["same_losses"] is (loss == "9.1")
    assert found["bf16, all fp8"]["installed_ratio"] == 0.9
    assert "same_losses" not in found["bf16, all fp8"]
    assert found["bf16, off"] == {"iteration_ms": 100.0, "peak_gib": 2.0}


def test_a_case_without_snip_comes_before_the_one_that_is_compared_with_it() -> None:
    for gpu in (False, True):
        names = list(cases(gpu))
        recipes = {name.split(", ")[0] for name in names}
        for recipe in recipes:
            assert next(n for n in names if n.startswith(recipe)) == f"{recipe}, off"
    assert skipped(None, gpu=False) == "no script: MEGATRON_MAIN is not set"


def test_the_first_minutes_run_few_cases() -> None:
    wanted = {}
    for part in (part for part in FIRST if part.module == "job"):
        only = part.arguments[part.arguments.index("--only") + 1]
        wanted[part.name] = [name for name in cases(gpu=True) if is_wanted(name, only)]
    assert wanted == {
        "measured": ["bf16, measured"],
        "memory": ["fp8 tensorwise, off", "fp8 tensorwise, half fp8"],
    }
    assert is_wanted("bf16, off", None) and is_wanted("bf16, off", "fp8,bf16")
