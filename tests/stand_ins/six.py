"""Imported by the tokenizers of Megatron-LM 0.16; the null tokenizer of the tests does not use it."""
