"""Train policies against each other, or estimate what each GEMM costs; print the tables.

    python -m benchmarks.compare policies [--targets 0.85,0.95] [--formats fp3,fp4] [--seeds 6]
    python -m benchmarks.compare forks [--formats fp3,fp4] [--pairs 48] [--data-seeds 2]
    python -m benchmarks.compare table [--figure FILE.svg]
    (each with --setup quick, which takes ten minutes, --scenario outliers, --results FILE)

`policies`: from a BF16 warm-up of each seed, one branch a variant and target; plans of a target
have equal shares of FLOPs in the low format. `forks`: from one warm-up, branches with a random half
of all GEMMs in the low format, in complementary pairs; a regression gives each GEMM's cost. A
branch is a row of benchmarks/results/policies.jsonl or compare.jsonl. A row that exists is not made
again, so a command resumes where it was stopped, and more seeds, targets or variants add rows.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.compare import curve
from benchmarks.compare.forks import fork_table, run_forks
from benchmarks.compare.policies import policy_table, run_policies
from benchmarks.compare.runs import SCENARIOS, SETUPS
from benchmarks.compare.store import ResultStore, groups
from benchmarks.machine import RESULTS
from megatron_snip.errors import UsageError

VARIANTS = ("snip-gemm", "grads-first", "snip-linear", "norms", "last-blocks", "random")
TARGETS = (0.5, 0.67, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
FILES = {"policies": "policies.jsonl", "forks": "compare.jsonl", "table": "policies.jsonl"}
"""Where the rows of a command are."""


def main() -> None:
    """Run the command line."""
    options = _arguments()
    store = ResultStore(options.results)
    try:
        if options.command == "policies":
            for low in options.formats:
                for seed in range(options.seeds):
                    run_policies(store, options, low, seed)
        elif options.command == "forks":
            run_forks(store, options)
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
    print(_tables(store, options.results))
    if options.figure:
        wanted = {"kind": "policies", "setup": options.setup, "scenario": options.scenario}
        curve.draw(store.select(wanted), options.figure)


def _tables(store: ResultStore, results: Path) -> str:
    """Return all tables of the rows as Markdown; the scores of forks lie beside `results`."""
    texts = []
    for name, rows in groups(store.rows).items():
        if name[0] == "forks":
            texts.append(fork_table(rows, name, results))
        elif "target" in rows[0]:
            texts.append(curve.table(rows, name))
        else:
            texts.append(policy_table(rows, name))
    return "\n\n".join(texts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("policies", "forks", "table"))
    parser.add_argument("--setup", choices=SETUPS, default="small")
    parser.add_argument("--scenario", choices=SCENARIOS, default="plain")
    parser.add_argument("--formats", type=_names, default=("fp3", "fp4"))
    parser.add_argument("--seeds", type=int, default=6, help="checkpoints of `policies`")
    parser.add_argument("--variants", type=_names, default=VARIANTS)
    parser.add_argument("--targets", type=_numbers, default=TARGETS, help="shares of FLOPs")
    parser.add_argument(
        "--pairs", type=int, default=48, help="complementary pairs of `forks` for each data seed"
    )
    parser.add_argument("--data-seeds", type=int, default=2, help="continuations of `forks`")
    parser.add_argument("--results", type=Path, help="file of the rows")
    parser.add_argument("--checkpoints", type=Path, help="keep warm models of this code here")
    parser.add_argument("--figure", type=Path, help="draw the gaps of a scenario here")
    options = parser.parse_args()
    options.results = options.results or RESULTS / FILES[options.command]
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    main()
