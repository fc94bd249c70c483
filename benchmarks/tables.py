"""The README's tables of measurements, made from benchmarks/results/*.json.

    python -m benchmarks.tables                  print all tables
    python -m benchmarks.tables --write FILE     replace what FILE holds between the markers
    python -m benchmarks.tables --check FILE     exit 1 if FILE holds something else

A table NAME stands between these markers, each on a line of its own:

    <!-- bench:NAME -->
    <!-- /bench:NAME -->

NAMEs: device, linear, kernels, step, switch, refresh, one row a machine and thing measured. A
machine that was not measured has no row; a table without rows says which command makes one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS
from megatron_snip.errors import UsageError

Row = tuple[str, ...]
Report = dict[str, Any]


def reports(folder: Path) -> list[Report]:
    """Return what `benchmarks.gpu` wrote, GPUs first."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    ours = [r for r in found if any(isinstance(r.get(name), dict) for name in TABLES)]
    return sorted(ours, key=lambda r: r["machine"]["gpu"] is None)


def _device(report: Report) -> Iterator[Row]:
    result = report["device"]
    if "bf16_tflops" in result:
        checks = result["checks"]
        yield (
            f"{result['copy_gigabytes_per_s']:.0f}",
            f"{result['bf16_tflops']:.3g}",
            f"{sum(check['met'] for check in checks)} of {len(checks)}",
        )


def _linear(report: Report) -> Iterator[Row]:
    for result in report["linear"].get("results", []):
        speed = result.get("speedup_over_bf16", {})
        cells = (_times(speed.get(f"{name} simulate")) for name in ("fp8", "fp4"))
        rate = f"{result['bf16_tflops']:.3g}" if "bf16_tflops" in result else ""
        yield " x ".join(map(str, result["shape"])), rate, *cells


def _kernels(report: Report) -> Iterator[Row]:
    kernels = report["machine"]["gpu"] is not None  # goals are theirs, not the reference path's
    for result in report["kernels"].get("results", []):
        goal = f">= {result['goal']:.2f}" if kernels and result["goal"] is not None else ""
        yield (
            result["name"],
            f"{result['milliseconds']:.3f}",
            f"{result['gigabytes_per_s']:.0f}",
            f"{result['copy_fraction']:.2f}",
            goal,
        )


def _step(report: Report) -> Iterator[Row]:
    for name, model in report["step"].get("models", {}).items():
        for plan, seconds in model["seconds"].items():
            ratio = model.get("over_bf16", {}).get(plan)
            peak = model.get("peak_bytes", {}).get(plan)
            yield (
                name,
                plan,
                model["recipes"].get(plan, ""),
                f"{seconds * 1e3:.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if peak is None else f"{peak / 2**30:.1f}",
            )


def _switch(report: Report) -> Iterator[Row]:
    result = report["switch"]
    if "extra_steps" in result:
        yield (
            str(result["linears"]),
            f"{result['apply_seconds'] * 1e3:.3f}",
            f"{result['step_seconds'] * 1e3:.0f}",
            f"{result['step_after_switch_seconds'] * 1e3:.0f}",
            f"{result['extra_steps']:+.2f}",
        )


def _refresh(report: Report) -> Iterator[Row]:
    result = report["refresh"]
    if "ratio" in result:
        yield (
            f"{result['iteration_s'] * 1e3:.0f}",
            f"{result['refresh_s'] * 1e3:.0f}",
            f"{result['ratio']:.2f}",
            f"{result['held_share_of_parameters']:.4%}",
            f"{result['extra_peak_over_bf16_gradients']:.1f}",
        )


TABLES: dict[str, tuple[Row, Callable[[Report], Iterator[Row]]]] = {
    "device": (("copy, GB/s", "BF16 GEMM, TFLOPS", "checks passed"), _device),
    "linear": (
        (
            "tokens x in x out",
            "BF16 TFLOPS",
            "fp8 simulated",
            "fp4 simulated",
        ),
        _linear,
    ),
    "kernels": (("kernel", "ms", "GB/s", "of copy", "goal"), _kernels),
    "step": (("model", "plan", "linears run", "ms", "over BF16", "peak, GiB"), _step),
    "switch": (("linears", "apply, ms", "step, ms", "step after, ms", "extra steps"), _switch),
    "refresh": (
        ("iteration, ms", "refresh, ms", "ratio", "held, of parameters", "peak, gradient copies"),
        _refresh,
    ),
}
"""Name -> (header, rows of a machine's report). Ratios over BF16 are speeds in `linear`."""


def markdown(name: str, found: Sequence[Report]) -> str:
    """Return one table.

    Raises:
        UsageError: if there is no such table.
    """
    if name not in TABLES:
        raise UsageError(f"no table is called '{name}'; known: {', '.join(TABLES)}")
    header, rows_of = TABLES[name]
    lines = []
    for report in found:
        if name in report:
            who = _machine(report["machine"])
            lines += [_line((who, *row)) for row in rows_of(report)]
    if not lines:
        return "Not measured yet: `make bench-gpu` measures, `python -m benchmarks.tables` prints."
    return "\n".join((_line(("machine", *header)), _line(["---"] * (len(header) + 1)), *lines))


def replaced(text: str, found: Sequence[Report]) -> str:
    """Return a document with its tables made anew.

    Raises:
        UsageError: if there is no marker, or one names no table or has no end.
    """
    names = re.findall(r"^<!-- bench:([\w-]+) -->$", text, re.MULTILINE)
    if not names:
        known = ", ".join(TABLES)
        raise UsageError(
            "there is no marker for a table; put the lines '<!-- bench:NAME -->' and "
            f"'<!-- /bench:NAME -->' where one shall stand, NAME one of {known}"
        )
    for name in names:
        start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        before, _, rest = text.partition(start + "\n")
        _, closing, after = rest.partition(end)
        if not closing:
            raise UsageError(f"'{start}' has no '{end}' after it; add the line")
        text = f"{before}{start}\n{markdown(name, found)}\n{end}{after}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Print, write or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace between markers")
    parser.add_argument("--check", type=Path, metavar="FILE", help="1 if FILE is out of date")
    args = parser.parse_args(argv)
    found = reports(args.results)
    if args.write:
        args.write.write_text(replaced(args.write.read_text(), found))
    elif args.check:
        text = args.check.read_text()
        return int(replaced(text, found) != text)
    else:
        for name in TABLES:
            print(f"## {name}\n\n{markdown(name, found)}\n")
    return 0


def _machine(machine: dict[str, Any]) -> str:
    name = machine["gpu"] or f"{machine['cpu']}, one core"
    return f"{name}, torch {machine['versions']['torch']}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UsageError as error:
        raise SystemExit(f"benchmarks.tables: {error}") from None
