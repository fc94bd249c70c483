"""`megatron-snip report`: a run, or several, as one HTML file; or live in the terminal.

The HTML file needs nothing else; beside it lies each of its pictures as a PNG. Runs under way are
reported as far as they have come.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from megatron_snip.errors import UsageError
from megatron_snip.reporting.live_run import LiveRun
from megatron_snip.reporting.live_view import follow

DIRECTORY = "report"

EXAMPLES = """\
RUN is what `megatron-snip train` writes to (--run-dir), or for a Megatron job what
--snip-output-dir says (by default snip/ below --save).

examples:
  megatron-snip report runs/demo
  megatron-snip report runs/bf16 runs/demo --output compared
  megatron-snip report runs/demo --follow
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's directory")
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help=f"where report.html and the PNGs go [{DIRECTORY}/ in the first RUN]",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="show the runs in the terminal while they go on; write no report",
    )


def run(args: argparse.Namespace) -> int:
    """Write the report, or follow the runs; return 0.

    Raises:
        UsageError: if a run's directory is bad, the output cannot be written, or a package that
            draws is missing.
    """
    if args.follow:
        if args.output is not None:
            raise UsageError("--follow writes no report; leave --output out")
        return _follow(args.runs)
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a report needs {' and '.join(missing)}; pip install 'megatron-snip[report]'"
        )
    from megatron_snip.reporting.report.build import make_report, read_runs

    runs = read_runs(args.runs)
    output = args.runs[0] / DIRECTORY if args.output is None else args.output
    report = make_report(runs)
    page = report.write(output)
    print(page)
    print(f"{len(report.pictures)} pictures beside it", file=sys.stderr)
    return 0


def _follow(paths: list[Path]) -> int:
    runs = [LiveRun(path) for path in paths]
    with contextlib.suppress(KeyboardInterrupt):  # how a live view is left
        follow(runs, Console(), time.sleep)
    return 0
