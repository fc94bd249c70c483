"""Transformer Engine's linears under this Megatron release; see the test that is named here."""

from tests.unit.linears.test_te_on_cpu import (
    test_transformer_engine_on_the_cpu as test_transformer_engine_on_the_cpu,
)
