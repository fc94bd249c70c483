"""Signals are remembered, and ask for nothing outside of their context."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_snip.trainer.stop import SIGNALS, StopRequests


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_remembered_until_asked_for(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequests(None) as requests:
        assert requests.agreed() is None
        os.kill(os.getpid(), number)
        assert requests.agreed() == number.name
    assert signal.getsignal(number) is before
