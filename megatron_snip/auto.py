"""`import megatron_snip.auto` as a script's first line: installs SNIP on `--snip`.

The same as `python -m megatron_snip SCRIPT`, for scripts that are started in another way. It must
come before anything that takes a function out of `megatron.training` by name.
"""

import sys

from megatron_snip.patches.install import install_for

sys.argv[1:] = install_for(sys.argv[1:])
