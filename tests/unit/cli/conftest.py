"""Fixtures of the command line's tests."""

from tests.unit.patches.conftest import fake as fake
