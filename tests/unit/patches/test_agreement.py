"""Settings that differ between ranks: which one, its values, whose."""

from argparse import Namespace
from typing import Any

import pytest

from megatron_snip.collectives import Gathered
from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.linears.te.machine import Machine
from megatron_snip.linears.te.recipe_table import RECIPES
from megatron_snip.patches import attach
from megatron_snip.patches.agreement import (
    OF_MEGATRON,
    files_of_rank,
    machine_of_rank,
    refuse_differences,
    settings_of_rank,
)

SAME = settings_of_rank(SnipConfig(), Namespace(seed=1, fp8=None))


def gathered(*others: tuple[dict[str, Any], range]) -> Gathered:
    """Ranks 0 to 7 have `SAME`, and others what is given."""
    values = [SAME, *({**SAME, **changes} for changes, _ in others)]
    return Gathered(tuple(values), ((range(8),), *((ranks,) for _, ranks in others)))


def test_equal_settings_are_accepted() -> None:
    refuse_differences(gathered())


def test_every_setting_of_ours_and_what_matters_of_megatrons_is_compared() -> None:
    names = {f"--snip-{name.replace('_', '-')}" for name in SnipConfig.model_fields}
    assert names - set(SAME) == {"--snip-output-dir"}
    assert SAME["--seed"] == "1" and SAME["--fp8"] == "None"
    assert settings_of_rank(SnipConfig(pins=("*=bf16",)), Namespace())["--snip-pins"] == "*=bf16"


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([({"--snip-interval": "50"}, range(8, 9))], "--snip-interval is 200 on ranks 0-7, 50 on "),
        ([({"--seed": "2"}, range(8, 16))], "--seed is 1 on ranks 0-7, 2 on ranks 8-15;"),
        ([({"--seed": "2", "--fp8": "e4m3"}, range(8, 9))], "2 on rank 8; --fp8 is None on ranks"),
        ([({f"--x{i}": "1"}, range(8 + i, 9 + i)) for i in range(9)], "on rank 8; --x1 is not "),
        ([({f"--x{i}": "1"}, range(8 + i, 9 + i)) for i in range(9)], "; 6 more; start all ranks"),
    ],
)
def test_a_difference_is_one_line_with_the_setting_its_values_and_their_ranks(
    others: list[tuple[dict[str, Any], range]], text: str
) -> None:
    with pytest.raises(UsageError) as refused:
        refuse_differences(gathered(*others))
    message = str(refused.value)
    assert text in message and message.startswith("the ranks have other settings: --")
    assert "\n" not in message and len(message) < 800


def test_what_decides_the_tokens_of_microbatches_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = set()

    class Recorded(Namespace):
        def __getattribute__(self, name: str) -> Any:
            names.add(name)
            return super().__getattribute__(name)

    # It is read as it is: the config has nothing to add.
    monkeypatch.setattr(attach, "running_settings", lambda args, config: args)
    attach.tokens_of(Recorded(seq_length=8, micro_batch_size=2, full_validation=True), Namespace())
    read = {name for name in names if not name.startswith("__")}
    assert "full_validation" in read and read <= set(OF_MEGATRON)


BLACKWELL = Machine((10, 0), "2.20.2")


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (Machine((12, 0), "2.20.2"), "GPU is compute capability 10.0 on ranks 0-7, compute capab"),
        (Machine((10, 0), "2.14.0"), "Transformer Engine is 2.20.2 on ranks 0-7, 2.14.0 on rank 8"),
        (Machine((10, 0)), "Transformer Engine is 2.20.2 on ranks 0-7, not there on rank 8"),
        (
            Machine((10, 0), "2.20.2", {"nvfp4": "not built"}),
            "Transformer Engine's recipe nvfp4 is available on ranks 0-7, not built on rank 8",
        ),
        (
            Machine((10, 0), "2.20.2", {"custom experts": "too old"}),
            "Transformer Engine's recipe custom experts is available on ranks 0-7, too old on",
        ),
        (
            Machine((10, 0), "2.20.2", backward_override="dequantized"),
            "NVTE_BACKWARD_OVERRIDE is without effect on ranks 0-7, dequantized on rank 8",
        ),
    ],
)
def test_another_machine_is_refused(machine: Machine, text: str) -> None:
    values = (machine_of_rank(BLACKWELL), machine_of_rank(machine))
    with pytest.raises(UsageError) as refused:
        refuse_differences(Gathered(values, ((range(8),), (range(8, 9),))))
    assert text in str(refused.value) and "\n" not in str(refused.value)


def test_every_variable_that_changes_a_recipe_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    same = machine_of_rank(BLACKWELL)
    settings = [setting for recipe in RECIPES.values() for setting in recipe.variables]
    assert {need for setting in settings for need in setting.needs} <= same.keys()
    for setting in settings:
        for value in setting.values:
            with monkeypatch.context() as environment:
                environment.setenv(setting.variable, value)
                other = machine_of_rank(BLACKWELL)
            text = f"{setting.variable} is without effect on rank 0, {value} on rank 1"
            with pytest.raises(UsageError, match=text):
                refuse_differences(Gathered((same, other), ((range(1),), (range(1, 2),))))
        monkeypatch.setenv(setting.variable, "0")  # changes nothing
    assert machine_of_rank(BLACKWELL) == same


def rules_of(stage: int, option: str) -> dict[str, str]:
    matcher = Namespace(pattern="*fc1*", config_key="a")
    recipe = Namespace(matchers=[matcher], configs={"a": {"training_recipe": option}})
    return files_of_rank(Namespace(quant_recipe=recipe), stage, None)


def test_a_precision_file_is_compared_by_its_content_within_a_pipeline_stage() -> None:
    first, last = SAME | rules_of(0, "fp8"), SAME | rules_of(1, "bf16")
    halves = ((range(4),), (range(4, 8),))
    refuse_differences(Gathered((first, last), halves))
    edited = SAME | rules_of(1, "fp4")
    ranks = ((range(4),), (range(4, 7),), (range(7, 8),))
    with pytest.raises(
        UsageError, match=r"file of pipeline stage 1 is one with SHA-256 .* on rank"
    ):
        refuse_differences(Gathered((first, last, edited), ranks))


def test_a_checkpoint_that_has_no_state_for_one_rank_is_refused() -> None:
    """In Megatron's format `torch` each rank has a file of its own."""
    plain = Namespace()
    values = tuple(SAME | files_of_rank(plain, 0, state) for state in ({"iteration": 7}, None))
    with pytest.raises(
        UsageError, match=r"SNIP's state in the checkpoint is one with .* none on r"
    ):
        refuse_differences(Gathered(values, ((range(7),), (range(7, 8),))))
