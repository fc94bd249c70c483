"""Communication buffers are made in both precisions where a plan may need them."""

from enum import Enum
from typing import Any

import pytest

from megatron_snip.patches.overlap_buffers import both_buffers
from megatron_snip.patches.registry import Session


class Mode(Enum):
    """As Transformer Engine's UserBufferQuantizationMode."""

    NONE = "none"
    FP8 = "fp8"


def asked(session: Session, **arguments: Any) -> tuple[Any, Any]:
    def initialize_ub(shape: Any, quantization_modes: Any = None, ub_cfgs: Any = None) -> Any:
        return quantization_modes, ub_cfgs

    function: Any = both_buffers.wrapper(initialize_ub, session)
    found: tuple[Any, Any] = function([32, 64], **arguments)
    return found


@pytest.mark.parametrize("run", list(Mode))
def test_both_are_asked_for(run: Mode) -> None:
    modes, settings = asked(Session(), quantization_modes=[run], ub_cfgs=[{"qkv_fprop": {}}])
    assert modes[0] is run and set(modes) == set(Mode)
    assert settings == [{"qkv_fprop": {}}] * 2
    assert asked(Session(), quantization_modes=[run], ub_cfgs={})[1] == [{}, {}]
    assert asked(Session(), quantization_modes=[run])[1] == [None, None]


def test_what_holds_for_the_job_s_precision_is_not_asked_for_in_the_other() -> None:
    """As Bridge's settings for BF16 and Megatron's files have them."""
    job = {
        "proj_fprop": {"method": "pipeline", "fp8_buf": (False,), "num_sm": 24},
        "qkv_dgrad": {"method": "ring_exchange", "aggregate": 0},
    }
    _, (own, added) = asked(Session(), quantization_modes=[Mode.FP8], ub_cfgs=job)
    assert own is job
    assert added == {
        "proj_fprop": {"method": "pipeline", "num_sm": 24},
        "qkv_dgrad": {"aggregate": 0},
    }


def test_beside_buffers_of_atomic_gemms_there_are_no_others() -> None:
    job = {"fc1_fprop": {"method": "ring_exchange", "atomic_gemm": 1}}
    modes, settings = asked(Session(), quantization_modes=[Mode.FP8], ub_cfgs=job)
    assert modes == [Mode.FP8] and settings is job


def test_a_run_that_only_measures_has_the_buffers_of_the_job() -> None:
    session = Session(makes_plans=False)
    assert asked(session, quantization_modes=[Mode.FP8])[0] == [Mode.FP8]
    assert asked(Session())[0] is None  # before 2.7 there is one kind
