"""Imported by the tokenizers of Megatron-LM 0.16; that of the tests does not use it."""
