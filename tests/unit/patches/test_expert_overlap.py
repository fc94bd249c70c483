"""Under expert-parallel overlap the experts' input stays while a plan may need it."""

from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_snip.patches.expert_overlap import freed_inputs, freed_inputs_before_0_19
from megatron_snip.patches.registry import Session


def rule_of_0_17(name: str, is_moe: bool, config: Any) -> bool:
    """What Megatron decides from 0.17 on, where its dispatcher hands on the input itself."""
    frees = {"mlp": config.fp8 is not None or config.fp4 is not None, "moe_combine": True}
    return is_moe and config.is_read and frees.get(name, False)


def under(experts_run_as_the_job: bool | None) -> Callable[..., bool]:
    session = Session()
    if experts_run_as_the_job is not None:
        model = SimpleNamespace(experts_run_as_the_job=experts_run_as_the_job)
        session.controller = SimpleNamespace(model=model)  # type: ignore[assignment]
    return freed_inputs.wrapper(rule_of_0_17, session)


def test_the_experts_input_is_not_freed_once_a_plan_changes_them() -> None:
    for formats in ({"fp8": "e4m3", "fp4": None}, {"fp8": None, "fp4": "e2m1"}):
        config = Namespace(**formats, is_read=True)
        for run in (None, True):
            assert under(run)("mlp", True, config)
        assert not under(False)("mlp", True, config)
        assert under(False)("moe_combine", True, config)
        assert not under(False)("mlp", False, config)


def test_this_release_has_one_of_the_functions() -> None:
    found = [p for p in (freed_inputs, freed_inputs_before_0_19) if p.problem() is None]
    assert len(found) == 1
