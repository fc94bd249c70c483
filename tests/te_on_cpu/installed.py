"""Import this before Megatron in a process that is to find Transformer Engine."""

from tests.te_on_cpu import install

install()
