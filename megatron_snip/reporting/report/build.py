"""From run directories to a report on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_snip.errors import UsageError
from megatron_snip.files import write_atomic
from megatron_snip.reporting.report.gallery import Section, common_section, run_section
from megatron_snip.reporting.report.page import Page, Part, page_html
from megatron_snip.reporting.report.picture import Picture, Rendering, render
from megatron_snip.reporting.report.tables import (
    Table,
    events_table,
    linears_table,
    plans_table,
    progress,
    settings_table,
    summary,
    tiles,
    versions_table,
)
from megatron_snip.reporting.report.words import joined
from megatron_snip.reporting.run_record import RunRecord, check_run_directory, read_run

FILE = "report.html"


@dataclass(frozen=True)
class Report:
    """A report in memory.

    Attributes:
        html: the page.
        pictures: PNG files by name.
    """

    html: str
    pictures: dict[str, bytes]

    def write(self, directory: Path) -> Path:
        """Write report.html and the PNGs into `directory` (made if need be); return the page.

        Raises:
            UsageError: if it cannot be written.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, image in self.pictures.items():
                (directory / name).write_bytes(image)
            write_atomic(directory / FILE, self.html)
        except OSError as error:
            raise UsageError(f"cannot write '{directory}': {error.strerror or error}") from None
        return directory / FILE


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read all runs; those whose directories have the same name are told apart by their parents.

    Raises:
        UsageError: one line, if a directory is bad or given twice.
    """
    for path in paths:
        check_run_directory(path)
    resolved = [path.resolve() for path in paths]
    twice = [path for path, count in Counter(resolved).items() if count > 1]
    if twice:
        raise UsageError(f"'{twice[0]}' is given twice")
    return [
        read_run(path, name) for path, name in zip(paths, distinct_names(resolved), strict=True)
    ]


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that differ from each other."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def make_report(runs: Sequence[RunRecord]) -> Report:
    """Draw and write everything into one page.

    Args:
        runs: at least one; several are compared.
    """
    alone = len(runs) == 1
    parts = [_part(common_section(runs), ())]
    for k, run in enumerate(runs):
        section = run_section(run, "" if alone else f"{k + 1}-")
        parts.append(_part(section, (plans_table(run), linears_table(run))))
    parts.append(Part("Settings and versions", (), _settings(runs)))
    page = Page(
        title=joined([run.name for run in runs]),
        subtitle=_subtitle(runs),
        tiles=tiles(runs[0]) if alone else (),
        tables=_top(runs),
        parts=tuple(parts),
    )
    drawn = [item for part in parts for item in part.pictures if isinstance(item, Rendering)]
    return Report(page_html(page), {f"{item.picture.slug}.png": item.png for item in drawn})


def _part(section: Section, tables: Sequence[Table | None]) -> Part:
    pictures = tuple(render(i) if isinstance(i, Picture) else i for i in section.items)
    return Part(section.title, pictures, tuple(table for table in tables if table is not None))


def _top(runs: Sequence[RunRecord]) -> tuple[Table, ...]:
    tables = [summary(runs), settings_table(runs, True)] if len(runs) > 1 else []
    tables += [events_table(run) for run in runs]
    return tuple(table for table in tables if table is not None)


def _settings(runs: Sequence[RunRecord]) -> tuple[Table, ...]:
    table = settings_table(runs, False)
    return (versions_table(runs),) if table is None else (table, versions_table(runs))


def _subtitle(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared."
    run = runs[0]
    words = [f"{progress(run)} training steps"]
    if run.snip is not None and run.snip.enabled:
        words.append(f"policy {run.snip.policy}")
        words.append(f"formats {', '.join(run.snip.formats)} by {run.snip.granularity}")
        words.append(f"measured every {run.snip.interval} steps")
    return ", ".join(words) + "."
