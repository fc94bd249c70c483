"""Names that Megatron imports; the stand-in does not recompute, and has no random states."""


class CudaRNGStatesTracker:
    pass


activation_recompute_forward = None
is_fp8_activation_recompute_enabled = None
