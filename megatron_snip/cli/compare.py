"""`megatron-snip compare`: the same training under every policy, and one table.

Exit status: 0; 1 if runs failed; 2 on bad input; 130 when interrupted (run it again to go on).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich import box
from rich.table import Table as RichTable

from megatron_snip.cli.plan_tables import plain_console
from megatron_snip.comparison.measured_rates import check_covers
from megatron_snip.comparison.outcome import Outcome
from megatron_snip.comparison.pool import Event, Pool
from megatron_snip.comparison.process import TrainingProcess
from megatron_snip.comparison.run import Run
from megatron_snip.comparison.schedule import Schedule, make_schedule
from megatron_snip.comparison.settings import (
    ComparisonConfig,
    ComparisonFields,
    load_comparison,
)
from megatron_snip.comparison.store import Store
from megatron_snip.comparison.table import Calibration, Table, make_tables
from megatron_snip.comparison.text import columns, markdown, to_json
from megatron_snip.errors import UsageError
from megatron_snip.files import write_atomic
from megatron_snip.flags import add_flags, given_values
from megatron_snip.options import Option
from megatron_snip.planning.calibration import read_calibration
from megatron_snip.reporting.report.words import printable

INTERRUPTED = 130

EXAMPLES = """\
Every contender trains from the same checkpoint on the same samples; gaps to BF16 are taken pair by
pair. Runs that have finished are not made again, so the same command goes on where it was stopped,
and more seeds, targets or policies only add to what is there. docs/comparison.md says more.

examples:
  megatron-snip compare --config configs/compare.yaml
  megatron-snip compare --config configs/compare.yaml --lowest fp3,fp4 --targets 0.75,0.9
  megatron-snip compare --config configs/compare.yaml --modes scratch --seeds 5
  megatron-snip compare --config configs/compare.yaml --list
  megatron-snip compare --config configs/compare.yaml --table --calibration seconds.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("Where settings come from, and what to do")
    group.add_argument("--config", metavar="FILE", type=Path, help="YAML file with settings")
    group.add_argument("--list", action="store_true", help="list the runs and what is done; only")
    group.add_argument(
        "--table", action="store_true", help="tables and report of what has finished; no run"
    )
    add_flags(parser, ComparisonFields)


def run(args: argparse.Namespace) -> int:
    """Make the runs that are missing, then the tables; return the exit status.

    Raises:
        UsageError: for bad input, or if the output cannot be written.
    """
    config = load_comparison(args.config, given_values(args, ComparisonFields))
    schedule, store = make_schedule(config), Store(config.output)
    for entry in schedule.runs:
        store.config_of(entry)  # refuse a setting that some run cannot have before the first one
    if args.list:
        _list(schedule, store)
        return 0
    books = _Books(config, schedule, store, _calibration(config))
    status = 0 if args.table else _run(config, schedule, store, books)
    try:
        books.close()
    except KeyboardInterrupt:
        print("megatron-snip: interrupted; --table makes tables and the report", file=sys.stderr)
        status = INTERRUPTED
    except UsageError as error:
        if not status:
            raise
        print(f"megatron-snip: error: {error}", file=sys.stderr)
    return status


def _run(config: ComparisonConfig, schedule: Schedule, store: Store, books: _Books) -> int:
    status = 0
    with store.locked() as lock:
        pool = Pool(
            store,
            lambda run: TrainingProcess(
                store.config_file(run), store.log(run), config.threads, lock
            ),
            config.jobs,
            _Teller(books),
        )
        former = signal.signal(signal.SIGTERM, _interrupt)
        try:
            pool.run(schedule.runs)
        except KeyboardInterrupt:
            status = INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, former)
    for key, problem in pool.failed.items():
        print(f"megatron-snip: run {key} failed: {problem}", file=sys.stderr)
    if status == INTERRUPTED:
        print("megatron-snip: interrupted; the same command goes on", file=sys.stderr)
    return status or (1 if pool.failed else 0)


def _calibration(config: ComparisonConfig) -> Calibration | None:
    """Return the machine that step times are predicted for, or None; refuse a table too small.

    Raises:
        UsageError: if the file is no table, or lacks what some run takes.
    """
    if config.calibration is None:
        return None
    table, model = read_calibration(config.calibration), config.train_config()
    formats: set[str] = set()
    for lowest in config.lowest:
        for name in config.policies:
            contender = config.contender(name, lowest)
            option = contender.uniform
            formats |= {config.gentle, lowest} if option is None else set(option.formats)
            for pin in contender.settings.get("pins", ()):
                formats |= set(Option.parse(pin.rpartition("=")[2]).formats)
    for names in check_covers(table, model, sorted(formats)):
        print(
            f"megatron-snip: '{config.calibration}' holds other shapes for '{names}' than this "
            "comparison trains; its seconds are scaled by FLOPs",
            file=sys.stderr,
        )
    return Calibration(table, model)


class _Teller:
    """Prints a line a run, and keeps the tables up to date."""

    def __init__(self, books: _Books) -> None:
        self._books = books
        self._begin = time.monotonic()
        self._made = 0

    def __call__(self, event: Event) -> None:
        self._made += 1
        width = len(str(event.total))
        words = [f"[{event.done:>{width}}/{event.total}] {event.run.name}"]
        if event.outcome is None:
            words.append("FAILED")
        elif event.outcome.validation_losses:
            words.append(f"validation {event.outcome.validation_loss:.4f}")
        pace = (time.monotonic() - self._begin) / self._made
        words += [
            f"{event.seconds:.0f} s",
            f"{pace * (event.total - event.done) / 60:.0f} min left",
        ]
        print("  ".join(words), flush=True)
        if event.outcome is not None and event.run.kind == "branch":
            self._books.write()


class _Books:
    """Keeps tables of what has finished, and in the end the pictures and the report."""

    def __init__(
        self,
        config: ComparisonConfig,
        schedule: Schedule,
        store: Store,
        calibration: Calibration | None,
    ) -> None:
        self._config = config
        self._schedule = schedule
        self._store = store
        self._calibration = calibration

    def write(self) -> tuple[tuple[Table, ...], dict[str, Outcome]]:
        """Write table.md and comparison.json; return the tables and the outcomes behind them."""
        store, entries = self._store, self._schedule.entries
        found = {run.key: store.outcome(run) for run in self._schedule.runs}
        outcomes = {key: outcome for key, outcome in found.items() if outcome is not None}
        tables = make_tables(entries, outcomes, self._calibration)
        if tables:
            write_atomic(store.path / "table.md", markdown(tables))
            text = json.dumps(to_json(tables, self._config, self._calibration), indent=1)
            write_atomic(store.path / "comparison.json", text + "\n")
        return tables, outcomes

    def close(self) -> None:
        """Write tables, pictures and the report, and show the tables."""
        tables, outcomes = self.write()
        _show(tables)
        missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
        if not tables:
            return
        if "matplotlib" not in missing:
            self._draw(tables, outcomes)
        if missing:
            print(
                f"megatron-snip: a report needs {' and '.join(missing)}; "
                "pip install 'megatron-snip[report]'",
                file=sys.stderr,
            )
            return
        from megatron_snip.comparison.report import make_comparison_report  # heavy and optional

        report = make_comparison_report(tables, self._schedule.entries, outcomes, self._config)
        folder = self._store.path / "report"
        for former in folder.glob("*.png"):  # of tables that are no longer asked for
            former.unlink(missing_ok=True)
        print(report.write(folder))

    def _draw(self, tables: tuple[Table, ...], outcomes: dict[str, Outcome]) -> None:
        from megatron_snip.comparison.curves import draw_table  # heavy and optional

        for table in tables:
            image = draw_table(table, self._schedule.entries, outcomes)
            if image is not None:
                (self._store.path / f"{table.slug}.png").write_bytes(image)


def _show(tables: tuple[Table, ...]) -> None:
    console = plain_console(240)
    for table in tables:
        head, *rows = columns(table)
        shown = RichTable(box=box.SIMPLE, title=table.title, title_justify="left")
        for k, heading in enumerate(head):
            shown.add_column(
                printable(heading), justify="left" if k == 0 else "right", no_wrap=k == 0
            )
        for row in rows:
            shown.add_row(*map(printable, row))
        console.print(shown)


def _list(schedule: Schedule, store: Store) -> None:
    for run in schedule.runs:
        print(f"{'done' if store.finished(run) else '-':<5}{_steps(run):>12}  {run.key}")


def _steps(run: Run) -> str:
    return f"{run.first_step}..{run.last_step}"


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
