"""Patches on Megatron-LM's loop, `megatron.training`."""
