"""Takes the figures of docs/tutorial.md and README.md out of a report.

    megatron-snip report runs/demo --reference runs/bf16
    python docs/pictures.py runs/demo/report/report.html

writes docs/images/*.svg.
"""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

FIGURES = ("loss", "frontier", "plan", "divergences")
_FIGURE = re.compile(r'<figure[^>]* id="([\w-]+)">.*?;base64,([\w+/=]+)"', re.DOTALL)

if __name__ == "__main__":
    found = dict(_FIGURE.findall(Path(sys.argv[1]).read_text(encoding="utf-8")))
    for name in FIGURES:
        path = Path(__file__).with_name("images") / f"{name}.svg"
        path.write_bytes(base64.b64decode(found[name]))
