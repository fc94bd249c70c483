"""Train policies against each other, or estimate what each GEMM costs; print the tables.

    python -m benchmarks.compare policies [--targets 0.85,0.95] [--formats fp3,fp4] [--seeds 6]
    python -m benchmarks.compare forks [--formats fp3,fp4] [--pairs 48] [--data-seeds 2]
    python -m benchmarks.compare kinds
    python -m benchmarks.compare rival [--hours 10]
    python -m benchmarks.compare collapse [--hours 6]
    python -m benchmarks.compare hardest [--hours 6]
    python -m benchmarks.compare table [--figure FILE.svg] [--page FILE.md ..]
    (each with --quick, which takes ten minutes, --scenario outliers, --results FILE)

`policies`: from a BF16 warm-up of each seed, one branch a variant and target; plans of a target
have equal shares of FLOPs in the low format. `forks`: from one warm-up, branches with a random half
of all GEMMs in the low format, in complementary pairs; a regression gives each GEMM's cost. A
branch is a row of benchmarks/results/policies.jsonl or compare.jsonl. A row that exists is not made
again, so a command resumes where it was stopped, and more seeds, targets or variants add rows.
`kinds` prints the weights of the policy `norms-kinds` from the rows of `forks`. `rival` makes the
missing rows of its schedule, and prints its verdict once they are complete. `collapse` trains
uniform recipes from scratch, and prints where FP4 loses much; `hardest` makes the branches of all
policies in the hardest of these cells.
"""

from __future__ import annotations

import argparse
import math
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
from benchmarks.compare.estimated import estimate, estimate_table
from benchmarks.compare.figure import draw
from benchmarks.compare.forks import Fit, fit, fork_table, run_forks
from benchmarks.compare.hardest import hardest_report, run_hardest
from benchmarks.compare.kinds import kinds_table
from benchmarks.compare.policies import policy_table, run_policies
from benchmarks.compare.rival import report, run_rival
from benchmarks.compare.runs import SCENARIOS, SETUPS
from benchmarks.compare.store import ResultStore, groups
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
    store = ResultStore(options.results, blind=options.command in ("rival", "hardest"))
    try:
        if options.command == "policies":
            for low in options.formats:
                for seed in range(options.first_seed, options.first_seed + options.seeds):
                    run_policies(store, options, low, seed)
        elif options.command == "forks":
            run_forks(store, options)
        elif options.command == "rival":
            run_rival(store, options)
            print(report(store.rows))
            return
        elif options.command == "collapse":
            run_collapse(store, options)
            print(collapse_report(store.rows))
            return
        elif options.command == "hardest":
            run_hardest(store, options)
            print(hardest_report(store.rows))
            return
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
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
    parser.add_argument("--variants", type=_names, default=curve.VARIANTS)
    parser.add_argument("--targets", type=_numbers, default=curve.TARGETS, help="shares of FLOPs")
    parser.add_argument(
        "--pairs", type=int, default=48, help="complementary pairs of `forks` for each data seed"
    )
    parser.add_argument("--data-seeds", type=int, default=2, help="continuations of `forks`")
    parser.add_argument(
        "--hours",
        type=float,
        default=math.inf,
        help="of a core that `rival`, `collapse` or `hardest` may use; 0 only prints",
    )
    parser.add_argument("--results", type=Path, help="file of the rows")
    parser.add_argument("--checkpoints", type=Path, help="keep warm models of this code here")
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
