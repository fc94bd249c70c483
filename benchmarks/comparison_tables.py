"""Tables of comparisons in README and docs, made from benchmarks/results/compare-*.json.

    python -m benchmarks.comparison_tables README.md docs/comparison.md            replace
    python -m benchmarks.comparison_tables --check README.md docs/comparison.md    1 if out of date

A table stands between these markers, each on a line of its own:

    <!-- compare:KIND FILE [FILE ...] -->
    <!-- /compare -->

FILE is `compare-warm-fp3-75`, or `compare-forks-90/fp4` where a file holds tables of several lowest
formats. KINDs:

    full    one comparison: losses, gaps, predicted step times
    short   one comparison: gaps alone
    gaps    the gap of every contender, a column for each comparison
    parts   what each part of a model costs, of a file of `benchmarks.parts`

Below each stands where it comes from. The JSON is what `megatron-snip compare` wrote.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks.machine import RESULTS
from benchmarks.parts import shares
from megatron_snip.comparison.contender import BASELINE
from megatron_snip.comparison.table import Row, Table
from megatron_snip.comparison.text import columns
from megatron_snip.errors import UsageError
from megatron_snip.reporting.report.words import plural

MARKED = re.compile(r"^<!-- compare:(\w+) (.+?) -->\n(.*?)^<!-- /compare -->$", re.M | re.S)

WORDS = {
    "fp8": "fp8 everywhere",
    "lowest": "the column's format everywhere",
    "greedy": "greedy on SNIP's numbers",
    "snip-linear": "**SNIP, one format a linear**",
    "snip-gemm": "**SNIP, one format a GEMM**",
}
"""Contenders as a table of gaps names them, where it is not their name."""

FORMATS = {"fp4": "E2M1 (`fp4`)", "fp3": "stress format (`fp3`)"}


def read_table(name: str, folder: Path = RESULTS) -> tuple[Table, dict[str, Any]]:
    """Return a comparison and the file that holds it.

    Args:
        name: of the file without its ending, and `/FORMAT` if it holds several.
        folder: where it lies.

    Raises:
        UsageError: if there is no such file or table.
    """
    stem, _, lowest = name.partition("/")
    content = _read(folder / f"{stem}.json")
    found = [t for t in content["tables"] if lowest in ("", t["lowest"])]
    if len(found) != 1:
        known = ", ".join(f"{stem}/{t['lowest']}" for t in content["tables"])
        raise UsageError(f"'{name}' names {len(found)} tables; give one of {known}")
    plain = {key: value for key, value in found[0].items() if key != "title"}
    return TypeAdapter(Table).validate_python(_unknown_is_nan(plain)), content


def made(kind: str, names: Sequence[str], folder: Path = RESULTS) -> str:
    """Return a table in Markdown and a line that says where it comes from.

    Raises:
        UsageError: if there is no such kind, file or table.
    """
    if kind == "parts":
        contents = [_read(folder / f"{name}.json") for name in names]
        cells = [line for content in contents for line in _parts(content)]
    elif kind in KINDS:
        found = [read_table(name, folder) for name in names]
        contents = [content for _, content in found]
        cells = KINDS[kind]([table for table, _ in found])
    else:
        known = ", ".join((*KINDS, "parts"))
        raise UsageError(f"no kind of table is called '{kind}'; known: {known}")
    head, *rows = _filled(cells)
    rule = tuple("---:" if k else "---" for k in range(len(head)))
    lines = ["| " + " | ".join(line) + " |" for line in (head, rule, *rows)]
    origins = [_origin(name, content) for name, content in zip(names, contents, strict=True)]
    return "\n".join([*lines, "", *dict.fromkeys(origins)])


def replaced(text: str, folder: Path = RESULTS) -> str:
    """Return a document with its tables made anew.

    Raises:
        UsageError: if there is none, or a marker names what does not exist or has no end.
    """
    begun = len(re.findall(r"^<!-- compare:", text, re.M))
    if begun == 0 or begun != len(MARKED.findall(text)):
        raise UsageError(
            "there is no marker, or one without an end; a table stands between the lines "
            "'<!-- compare:KIND FILE -->' and '<!-- /compare -->'"
        )

    def table(match: re.Match[str]) -> str:
        kind, names = match[1], match[2]
        body = made(kind, names.split(), folder)
        return f"<!-- compare:{kind} {names} -->\n{body}\n<!-- /compare -->"

    return MARKED.sub(table, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Replace or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what to look through")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    args = parser.parse_args(argv)
    stale = 0
    for file in args.files:
        try:
            before = file.read_text(encoding="utf-8")
            after = replaced(before)
        except (OSError, UsageError) as error:
            parser.error(f"{file}: {error}")
        if after != before:
            stale = 1
            print(f"{file}: {'out of date' if args.check else 'written'}")
            if not args.check:
                file.write_text(after, encoding="utf-8")
    return stale if args.check else 0


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"there is no '{path}'")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _parts(parts: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("part", "cost, 1e-3", "share of fprop", "SNIP's")]
    lines += [(f"{g}, all linears", f"{1e3 * c:.1f}", "", "") for g, c in parts["costs"].items()]
    for what, word in (("layer", "layer "), ("kind", "")):
        costs, predicted = parts[f"fprop_by_{what}"], parts[f"predicted_by_{what}"]
        for name, share in shares(costs).items():
            cells = (f"fprop of {word}{name}", f"{1e3 * costs[name]:.1f}", f"{share:.2f}")
            lines.append((*cells, f"{predicted[name]:.2f}" if predicted else ""))
    return lines


def _full(tables: Sequence[Table]) -> list[tuple[str, ...]]:
    return _without(_only(tables), ("seeds", "diverged"))


def _short(tables: Sequence[Table]) -> list[tuple[str, ...]]:
    table = _only(tables)
    kept = Table(table.mode, table.lowest, table.target, _quantized(table))
    drop = ("seeds", "diverged", "validation loss", "gap, %")
    return _without(kept, drop, "step, ")


def _gaps(tables: Sequence[Table]) -> list[tuple[str, ...]]:
    """One row a contender, in the order of the first comparison; uniform lowest shares a row."""
    gaps = [
        {("lowest" if r.contender == t.lowest else r.contender): r.gap for r in _quantized(t)}
        for t in tables
    ]
    names = dict.fromkeys(name for of_table in gaps for name in of_table)
    heads = [f"{FORMATS.get(t.lowest, t.lowest)}, {_seeds(t)}" for t in tables]
    lines: list[tuple[str, ...]] = [("policy", *heads)]
    for name in names:
        cells = []
        for of_table in gaps:
            gap = of_table.get(name)
            text = "" if gap is None else f"{1e3 * gap.mean:.1f}"
            if gap is not None and math.isfinite(gap.deviation):
                text += f" +- {1e3 * gap.deviation:.1f}"
            cells.append(f"**{text}**" if text and name.startswith("snip") else text)
        lines.append((WORDS.get(name, name), *cells))
    return lines


KINDS = {"full": _full, "short": _short, "gaps": _gaps}


def _only(tables: Sequence[Table]) -> Table:
    if len(tables) != 1:
        raise UsageError(f"this kind shows one comparison, got {len(tables)}")
    return tables[0]


def _quantized(table: Table) -> tuple[Row, ...]:
    return tuple(row for row in table.rows if row.contender != BASELINE)


def _without(
    table: Table, headings: tuple[str, ...], beginning: str | None = None
) -> list[tuple[str, ...]]:
    head, *rows = columns(table)
    kept = [
        k
        for k, name in enumerate(head)
        if name not in headings and not (beginning and name.startswith(beginning))
    ]
    return [tuple(line[k] for k in kept) for line in (head, *rows)]


def _filled(lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Leave out columns that say nothing, such as distances to a rival that did not run."""
    kept = [k for k in range(len(lines[0])) if any(line[k] for line in lines[1:])]
    return [tuple(line[k] for k in kept) for line in lines]


def _seeds(table: Table) -> str:
    counts = {row.seeds for row in table.rows}
    return (
        plural(counts.pop(), "seed")
        if len(counts) == 1
        else f"{min(counts)} to {max(counts)} seeds"
    )


def _origin(name: str, content: dict[str, Any]) -> str:
    machine = content["machine"]
    stem, (commit, dash, changed) = (
        name.partition("/")[0],
        (content["commit"] or "?").partition("-"),
    )
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    made_at = f"commit {commit[:10]}{dash}{changed}"
    return f"`benchmarks/results/{stem}.json`: {machine['date']}, {where}, {made_at}."


def _unknown_is_nan(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {key: _unknown_is_nan(item) for key, item in value.items()}
    return [_unknown_is_nan(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(main())
