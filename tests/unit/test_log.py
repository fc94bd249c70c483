"""Warnings that are said once."""

import logging

import pytest

from megatron_snip.log import forget_warnings, warn_once


def test_a_warning_is_said_once_until_it_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("megatron_snip.test")
    forget_warnings()
    for text in ("one", "two", "one", "one"):
        warn_once(logger, text)
    assert [r.getMessage() for r in caplog.records] == ["one", "two"]
    forget_warnings()
    warn_once(logger, "one")
    assert [r.getMessage() for r in caplog.records] == ["one", "two", "one"]
    forget_warnings()
