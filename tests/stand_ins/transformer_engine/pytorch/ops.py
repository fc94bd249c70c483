"""Names that Megatron's annotations mention; fused operations are refused under SNIP."""


class FusibleOperation:
    pass


class Sequential:
    pass
