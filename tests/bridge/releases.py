"""Older releases of Megatron-Bridge, unpacked one folder each, and SNIP's patches on each."""

import os
from pathlib import Path

from megatron_snip.patches.install import MEGATRON_BRIDGE

FOLDER = Path(os.environ.get("BRIDGE_RELEASES", "/nonexistent"))
OF_BRIDGE = [p for p in MEGATRON_BRIDGE.patches if p.module.startswith("megatron.bridge.")]
