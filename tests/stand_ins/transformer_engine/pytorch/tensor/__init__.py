"""What Megatron asks parameters for: the stand-in stores none in low precision."""


class QuantizedTensor:
    pass
