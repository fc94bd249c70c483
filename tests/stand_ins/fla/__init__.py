"""What Megatron's Gated DeltaNet calls of flash-linear-attention in training, in PyTorch."""
