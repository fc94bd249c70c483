"""Import this first in a process that is to find the stand-ins in place of the real packages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
