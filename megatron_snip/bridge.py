"""What a script of Megatron-Bridge imports: SnipCallback and SnipConfig.

The same as flags after `python -m megatron_snip SCRIPT`, for recipes that set all in code.
"""

from megatron_snip.config import SnipConfig
from megatron_snip.patches.megatron_bridge.callback import SnipCallback

__all__ = ["SnipCallback", "SnipConfig"]
