"""Transformer Engine's linears under this Megatron release; see the test that is named here."""

from tests.unit.linears.test_te_stand_in import (
    test_transformer_engine_s_linears_on_its_stand_in as test_transformer_engine_s_linears_on_its_stand_in,  # noqa: E501
)
