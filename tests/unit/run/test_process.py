"""What a rank's process loads."""

import subprocess
import sys


def test_ranks_do_not_load_the_solver() -> None:
    """Only its own process solves; OR-Tools takes memory and time in every other."""
    code = "import sys, megatron_snip.run.controller; sys.exit('ortools' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0
