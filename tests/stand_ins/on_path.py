"""Import this first in a process that is to find the stand-ins in place of the real packages."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
