"""What Mamba's layers take from einops in training; torch ships the same function."""

from functorch.einops import rearrange as rearrange

repeat = None  # for inference and context parallelism
