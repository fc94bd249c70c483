"""`megatron-snip report`: a run as one HTML file.

A run in progress is reported up to its last iteration.
"""

import argparse
import logging
from importlib.util import find_spec
from pathlib import Path

from megatron_snip.cli.common import check_output, progress, write_output
from megatron_snip.errors import UsageError

logger = logging.getLogger(__name__)

DIRECTORY = "report"
FILE = "report.html"

EXAMPLES = (
    "megatron-snip report runs/demo --reference runs/bf16",
    "megatron-snip report runs/demo --output demo-report",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    text = "--run-dir of 'megatron-snip train', or --snip-output-dir of a Megatron job"
    add("run", metavar="RUN", type=Path, help=text)
    text = "a run, usually BF16, or its metrics.jsonl, to which the loss gap is taken"
    add("--reference", metavar="RUN", type=Path, help=f"{text} [the run's --snip-reference]")
    add("--output", metavar="DIR", type=Path, help=f"where {FILE} goes [{DIRECTORY}/ in RUN]")


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path; return 0.

    Raises:
        UsageError: if a run is bad, the output cannot be written, or a package is missing.
    """
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a report needs {' and '.join(missing)}; pip install 'megatron-snip[report]'"
        )
    from megatron_snip.reporting.report import make_report, read_reference
    from megatron_snip.reporting.run_record import read_run

    output = (args.run / DIRECTORY if args.output is None else args.output) / FILE
    check_output(output, (args.reference,))
    run = read_run(args.run)
    reference = None
    if args.reference is not None:
        reference = read_reference(args.reference)
    elif run.snip is not None and run.snip.reference is not None:
        try:
            reference = read_reference(run.snip.reference)
        except UsageError as error:  # the run was copied, or is read from another folder
            logger.warning("the report has no loss gap: %s; see --reference", error)
    with progress("making the report") as done:
        page = make_report(run, reference, done)
    write_output(output, page, make_folder=True)
    print(output)
    return 0
