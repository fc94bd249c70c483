"""Megatron's linears under a plan: quantized GEMMs, options per linear, what can run where."""
