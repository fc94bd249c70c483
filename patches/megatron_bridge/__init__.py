"""Patches on Megatron-Bridge's loop, `megatron.bridge.training`, and its callback."""
