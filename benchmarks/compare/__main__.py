"""Train policies against each other, and print the tables of all comparisons.

    python -m benchmarks.compare policies [--targets 0.85,0.95] [--formats fp3] [--results FILE]
    python -m benchmarks.compare collapse [--hours 6]
    python -m benchmarks.compare forks
    python -m benchmarks.compare kinds
    python -m benchmarks.compare rival
    python -m benchmarks.compare hardest
    python -m benchmarks.compare table [--figure FILE.svg] [--page FILE.md ..]
    (--setup quick takes ten minutes)

`policies`: from a BF16 warm-up of each seed, one branch a variant and target; plans of a target
have equal shares of FLOPs in the low format. `collapse` trains uniform recipes from scratch, and
prints where FP4 loses much. Both make the rows that are missing. A row that exists is not made
again, so a command resumes where it was stopped, and more seeds, targets or variants add rows.

The rows of `forks` (what each GEMM costs), `rival` (products against norms) and `hardest` (all
policies where FP4 loses most), and those of `policies` with plans of SNIP, come from measured
products. The tag `products-last` makes them; here their tables are printed. `kinds` prints the
weights of the policy `norms-kinds` from the rows of `forks`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.compare import curve
from benchmarks.compare.collapse import collapse_report, run_collapse
from benchmarks.compare.estimated import ESTIMATED, estimate, estimate_table
from benchmarks.compare.figure import draw
from benchmarks.compare.forks import Fit, fit, fork_table
from benchmarks.compare.hardest import hardest_report
from benchmarks.compare.kinds import kinds_table
from benchmarks.compare.policies import policy_table, run_policies
from benchmarks.compare.rival import report
from benchmarks.compare.runs import SCENARIOS, SETUPS
from benchmarks.compare.store import ResultStore, groups
from benchmarks.compare.variants import AT_TAG, TAG
from benchmarks.machine import RESULTS
from megatron_snip.errors import UsageError

FILES = {
    "policies": "policies.jsonl",
    "forks": "compare.jsonl",
    "kinds": "compare.jsonl",
    "rival": "rival.jsonl",
    "collapse": "collapse.jsonl",
    "hardest": "hardest.jsonl",
    "table": "policies.jsonl",
}
"""Where the rows of a command are."""

END_MARK = "<!-- end -->"
"""Behind what `table --page` writes; `fill_page` has the marks before it."""


def main() -> None:
    """Run the command line."""
    options = _arguments()
    if options.hours and options.command != "collapse":
        raise SystemExit(
            f"error: --hours {options.hours:g}: only `collapse` makes rows for some hours; rows "
            f"with plans from products are made at the tag {TAG} (git checkout {TAG})"
        )
    store = ResultStore(options.results)
    try:
        if options.command == "policies":
            for low in options.formats:
                for seed in range(options.first_seed, options.first_seed + options.seeds):
                    run_policies(store, options, low, seed)
        elif options.command == "collapse":
            run_collapse(store, options)
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
    reports = {"rival": report, "collapse": collapse_report, "hardest": hardest_report}
    if options.command in reports:
        print(reports[options.command](store.rows))
        return
    fits = _fits(options)
    if options.command == "kinds":
        print(kinds_table(fits))
        return
    print(_tables(store.rows, fits))
    if options.figure:
        wanted = {"kind": "policies", "setup": options.setup, "scenario": options.scenario}
        estimates = {low: estimate(fitted, low) for low, fitted in fits.items()}
        draw(store.select(wanted), estimates, options.figure)
    if options.page:
        wanted = {"kind": "policies", "scenario": options.scenario}
        found = list(groups(store.select(wanted)).values())
        # The setup that was asked for comes first.
        found.sort(key=lambda rows: rows[0]["setup"] != options.setup)
        for page in options.page:
            fill_page(page, found)


def fill_page(page: Path, found: Sequence[list[dict[str, Any]]]) -> None:
    """Write the curves of each setup and format between the marks of a page.

    The mark `<!-- table --page: all -->` asks for all that `curve.table` has of each;
    `<!-- table --page: fp3 small -->` for the summary of that format and setup.
    """
    makers = {"all": lambda: "\n\n".join(curve.table(rows) for rows in found)}
    for rows in found:
        makers[f"{rows[0]['low']} {rows[0]['setup']}"] = partial(curve.summary, rows)
    text = page.read_text()
    num_filled = 0
    for name, make in makers.items():
        head, mark, rest = text.partition(f"<!-- table --page: {name} -->\n")
        _, end, tail = rest.partition(END_MARK)
        if mark and end:
            text = f"{head}{mark}\n{make()}\n\n{end}{tail}"
            num_filled += 1
    if not num_filled:
        raise SystemExit(
            f"error: {page} has no line '<!-- table --page: NAME -->' before a line '{END_MARK}'; "
            f"NAME is one of {', '.join(makers)}"
        )
    page.write_text(text)


def _fits(options: argparse.Namespace) -> dict[str, Fit]:
    """Return the costs of GEMMs by low format: those of `--results`, else the committed ones."""
    found = {}
    for path in (RESULTS / FILES["forks"], options.results):
        wanted = {"kind": "forks", "setup": options.setup, "scenario": options.scenario}
        for (*_, low), rows in groups(ResultStore(path).select(wanted)).items():
            fitted = fit(rows, path)
            if fitted is not None:
                found[low] = fitted
    return found


def _tables(rows: list[dict[str, Any]], fits: Mapping[str, Fit]) -> str:
    """Return all tables as Markdown."""
    texts = []
    for name, group in groups(rows).items():
        if name[0] == "policies":
            texts.append(f"### {' '.join(name)}")
            make = curve.table if "target" in group[0] else policy_table
            texts.append(make(group))
    for low, fitted in fits.items():
        texts += [f"### forks {low}", fork_table(fitted), estimate_table(estimate(fitted, low))]
    return "\n\n".join(texts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=tuple(FILES))
    parser.add_argument("--setup", choices=SETUPS, default="small")
    parser.add_argument("--quick", dest="setup", action="store_const", const="quick",
                        help="--setup quick: a smaller model and shorter runs")  # fmt: skip
    parser.add_argument("--scenario", choices=SCENARIOS, default="plain")
    parser.add_argument("--formats", type=_names, default=("fp3", "fp4"))
    parser.add_argument("--seeds", type=int, default=6, help="checkpoints of `policies`")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="rows of one seed must come from one machine"
    )
    parser.add_argument(
        "--variants",
        type=_names,
        default=tuple(name for name in ESTIMATED if name not in AT_TAG),
        help="of `policies`: policies, norms-q-gemm, norms-q-linear",
    )
    parser.add_argument("--targets", type=_numbers, default=curve.TARGETS, help="shares of FLOPs")
    parser.add_argument(
        "--hours", type=float, help="of a core that `collapse` may use; 0 only prints"
    )
    parser.add_argument("--results", type=Path, help="file of the rows")
    parser.add_argument("--figure", type=Path, help="draw the gaps of a scenario here")
    parser.add_argument(
        "--page", type=Path, nargs="+", help="write the curve's tables between marks of these pages"
    )
    options = parser.parse_args()
    options.results = options.results or RESULTS / FILES[options.command]
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    main()
