"""A run directory as records for reports; `run_directory.py` describes the files.

A run in progress is read up to its last complete line. Where a resumed run went back, lines and
files of iterations that were not repeated yet are left out. Files are not trusted: each one is
checked, and a bad one is refused in one line.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field

from megatron_snip.config import SnipConfig, make_config
from megatron_snip.directory import check_plain
from megatron_snip.errors import UsageError, listing, shown
from megatron_snip.files import (
    Label,
    checked,
    parse_json,
    read_json,
    read_record,
    read_text,
    read_yaml,
)
from megatron_snip.options import BF16
from megatron_snip.planning.plan import PrecisionPlan, read_plan
from megatron_snip.planning.problem import PlanningProblem, parse_option, read_problem
from megatron_snip.statistics.health_table import HealthTable

logger = logging.getLogger(__name__)

# Sums, and the axes of figures, must stay far from a double's overflow.
_Number = Annotated[float, Field(ge=-1e150, le=1e150)] | None
_Count = Annotated[int, Field(ge=0, lt=2**31)]

_OptionName = Annotated[str, AfterValidator(lambda text: str(parse_option(text)))]


class _Notice(BaseModel, strict=True):
    kind: str
    message: str


class _Row(BaseModel, strict=True):
    """A row of metrics.jsonl.

    A row with `plan_iteration` is the first one under a new plan. `plan_iteration` names the plan's
    file: it is the iteration at which the plan was asked for, usually `lag` before the row's own.
    """

    iteration: Annotated[_Count, Field(ge=1)]
    plan_iteration: _Count | None = None
    changed_linears: _Count | None = None
    loss: _Number = None
    validation_loss: _Number = None
    lowest_precision_fraction: _Number = None
    wall_s: _Number = None
    refresh_s: _Number = None
    wait_s: _Number = None
    step_s: _Number = None
    predicted_saving_s: _Number = None
    notices: list[_Notice] = []


@dataclass(frozen=True)
class MetricRows:
    """metrics.jsonl.

    Attributes:
        rows: One row of the file for each iteration, in ascending order.
    """

    rows: tuple[dict[str, Any], ...]

    @property
    def last_iteration(self) -> int:
        """The last iteration that has ended; 0 if none has."""
        return int(self.rows[-1]["iteration"]) if self.rows else 0

    @property
    def refreshes(self) -> frozenset[int]:
        """The iterations at which a refresh ended."""
        return frozenset(row["iteration"] for row in self.rows if "refresh_s" in row)

    def column(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return (iterations, values) of the rows that have `name`; null becomes NaN."""
        rows = [row for row in self.rows if name in row]
        iterations = [row["iteration"] for row in rows]
        values = [np.nan if row[name] is None else row[name] for row in rows]
        return np.array(iterations, np.int64), np.array(values, np.float64)

    def last(self, name: str) -> float | None:
        """Return the last value of a column, or None if there is none."""
        for row in reversed(self.rows):
            if row.get(name) is not None:
                return float(row[name])
        return None

    def total(self, name: str) -> float:
        """Return the sum of a column, without NaN."""
        return float(np.nansum(self.column(name)[1]))

    def mean(self, name: str, start: int, end: int) -> float | None:
        """Return the mean of a column over iterations start .. end - 1, without NaN, or None."""
        at, values = self.column(name)
        found = values[(at >= start) & (at < end) & ~np.isnan(values)]
        return float(found.mean()) if found.size else None

    def gap_to(self, reference: Self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return (iterations, loss minus the reference's) where both losses are finite."""
        at, losses = self.column("loss")
        base_at, base = reference.column("loss")
        common, first, second = np.intersect1d(at, base_at, return_indices=True)
        gap = losses[first] - base[second]
        return common[np.isfinite(gap)], gap[np.isfinite(gap)]

    @property
    def notices(self) -> list[tuple[int, str, str]]:
        """(iteration, kind, message) of every notice, in order."""
        notices = []
        for row in self.rows:
            for notice in row.get("notices", ()):
                notices.append((row["iteration"], notice["kind"], notice["message"]))
        return notices


class _Statistics(BaseModel, strict=True):
    formats: dict[str, dict[str, _Number]] = {}


class LinearRecord(BaseModel, strict=True):
    """One linear of a divergences file.

    Attributes:
        name: Name of the linear.
        options: Values by option and measure; None where a value could not be measured.
        statistics: The sums behind the values; `formats` has them by format.
    """

    name: Label
    options: dict[_OptionName, dict[str, _Number]]
    statistics: _Statistics = _Statistics()


class Divergences(BaseModel, strict=True):
    """divergences/<iteration>.json.

    Attributes:
        iteration: The measured iteration.
        loss: Loss of that iteration.
        linears: The linears in the model's order.
    """

    iteration: _Count
    loss: _Number = None
    linears: Annotated[tuple[LinearRecord, ...], Field(strict=False)]

    @property
    def uniform_quantized_options(self) -> tuple[str, ...]:
        """Options with one format in all three GEMMs; not bf16, whose divergences are 0."""
        names = self.linears[0].options if self.linears else ()
        uniform = [name for name in names if len(set(parse_option(name).formats)) == 1]
        return tuple(name for name in uniform if name != "bf16")

    def values(self, option: str, measure: str) -> dict[str, float | None]:
        """Return {linear: value} of one option."""
        return {each.name: each.options.get(option, {}).get(measure) for each in self.linears}


@dataclass(frozen=True)
class PlanSpan:
    """Iterations that ran under one plan.

    Attributes:
        start: First iteration under the plan.
        end: One past the last iteration under it.
        plan: The plan.
        num_changed: Number of linears whose option it changed.
        wait_s: Seconds that training waited for it.
        saving_s: Predicted seconds that it saves in each step against BF16; None without
            `--snip-cost time`.
        step_s: Mean seconds of a step under it, as observed (`step_s` of metrics.jsonl).
    """

    start: int
    end: int
    plan: PrecisionPlan
    num_changed: int
    wait_s: float
    saving_s: float | None
    step_s: float | None


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        path: The run's directory.
        config: Content of config.yaml as plain values.
        snip: SNIP's settings; None where this version cannot read them.
        versions: Content of versions.json; empty if there is no such file.
        metrics: Metrics of every iteration.
        plans: The plans in order, each with its iterations; empty for a run without plans.
        divergences: Divergences of the last refresh, or None.
        problem: Planning problem of the last refresh, or None.
        health: Health at the last refresh before the first plan was applied, then at the latest
            refresh. It is one table if both are the same refresh or only one of them exists, and
            empty without any refresh.
        simulated: Whether quantized linears were simulated; None if that is not known.
    """

    path: Path
    config: dict[str, Any]
    snip: SnipConfig | None
    versions: Any
    metrics: MetricRows
    plans: tuple[PlanSpan, ...]
    divergences: Divergences | None
    problem: PlanningProblem | None
    health: tuple[HealthTable, ...]
    simulated: bool | None

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    @property
    def plan(self) -> PrecisionPlan | None:
        """The current plan, or None."""
        return self.plans[-1].plan if self.plans else None

    @property
    def train_iters(self) -> int | None:
        """Iterations that the run is to make (the trainer's or Megatron's setting), if known."""
        megatron = self.config.get("megatron")
        values = megatron if isinstance(megatron, dict) else self.config
        total = values.get("train_iters")
        if type(total) is not int or total < 0:  # `isinstance` would take True
            return None
        return total

    @property
    def lowest_formats_label(self) -> str:
        """What to call the formats that `lowest_precision_fraction` counts."""
        return "lowest precision" if self.snip is None else self.snip.lowest_formats_label

    @property
    def target(self) -> float | None:
        """The target as a share of FLOPs; under a target schedule, that of the current plan.

        None where no plan is made, or where the target counts seconds.
        """
        snip = self.snip
        if snip is None or not snip.enabled or snip.collect_only or snip.cost == "time":
            return None
        if snip.target_changes and self.plan is not None:
            return self.plan.target
        return snip.efficiency_target

    def quality_share(self, quality_loss: float | None) -> float | None:
        """Return a quality loss as share of the uniform lowest precision's, which is 1 + lambda."""
        if quality_loss is None or self.snip is None:
            return None
        return quality_loss / (1 + self.snip.weight_lambda)


def only_bf16(spans: Iterable[PlanSpan]) -> bool:
    """Return whether all linears are in BF16 under all plans; true without plans."""
    return all(set(span.plan.linears.values()) <= {BF16} for span in spans)


def check_run_directory(path: Path) -> None:
    """Refuse what is no directory, cannot be read, or holds links in place of a run's files.

    Raises:
        UsageError: one line.
    """
    try:
        if not path.exists():
            raise UsageError(f"cannot find the run directory '{path}'")
        if not path.is_dir():
            raise UsageError(f"'{path}' is a file; give the run's directory")
        check_plain(path)
    except OSError as error:
        raise UsageError(f"cannot read '{error.filename}': {error.strerror}") from None


def read_run(path: Path) -> RunRecord:
    """Read a run's directory.

    Raises:
        UsageError: if it is not a run directory, no iteration has ended, or a file is damaged or
            a link.
    """
    check_run_directory(path)
    settings = path / "config.yaml"
    versions = path / "versions.json"
    inside = path / "snip"
    if not settings.is_file():
        hint = f"; did you mean '{inside}'?" if (inside / "config.yaml").is_file() else ""
        raise UsageError(f"'{path}' is not a run directory: it has no config.yaml{hint}")
    config = read_yaml(settings)
    # Read first. A run in progress writes a plan before the row that names it, so the plan of each
    # row that is read here has its file.
    metrics = read_metrics(path / "metrics.jsonl")
    snip = _snip_config(config)
    plans = plan_spans(path, metrics)
    divergences_file = file_of_last_refresh(path / "divergences", metrics)
    problem_file = file_of_last_refresh(path / "problems", metrics)
    return RunRecord(
        path=path,
        config=config,
        snip=snip,
        versions=read_json(versions, "versions file") if versions.is_file() else {},
        metrics=metrics,
        plans=plans,
        divergences=None if divergences_file is None else read_divergences(divergences_file),
        problem=None if problem_file is None else read_problem(problem_file),
        health=tuple(_health(path / "health", metrics, plans)),
        simulated=_simulated(path / "precision", metrics.last_iteration, snip),
    )


def read_metrics(path: Path) -> MetricRows:
    """Read metrics.jsonl. A last line without its newline is left out.

    Other lines that are no row, such as those that a crash of the machine left, are left out with
    one warning, which names the first of them.

    Raises:
        UsageError: if no iteration has ended, the file cannot be read, or no line is a row.
    """
    rows: list[dict[str, Any]] = []
    text = read_text(path, f"metrics file '{path}'", errors="replace") if path.exists() else ""
    lines = text.split("\n")[:-1]
    bad: dict[int, UsageError] = {}
    for k, line in enumerate(lines, start=1):
        source = f"'{path}', line {k}"
        try:
            row = checked(_Row, parse_json(line, source), source).model_dump(exclude_unset=True)
        except UsageError as error:
            bad[k] = error
            continue
        while rows and rows[-1]["iteration"] >= row["iteration"]:
            rows.pop()  # the run went back to a checkpoint
        rows.append(row)
    first_error = next(iter(bad.values()), None)
    if not rows and first_error is not None:
        raise first_error
    if not rows:
        raise UsageError(f"'{path}' has no metrics yet: no iteration has ended")
    if first_error is not None:
        logger.warning(
            "snip: %d of %d lines are left out (%s): %s",
            len(bad),
            len(lines),
            listing([str(number) for number in bad]),
            shown(first_error),
        )
    return MetricRows(tuple(rows))


def _health(folder: Path, metrics: MetricRows, plans: Sequence[PlanSpan]) -> Iterator[HealthTable]:
    """Yield the tables of `RunRecord.health`."""
    files = [file_of_last_refresh(folder, metrics)]
    if plans:  # what was measured before the first plan comes first
        files.insert(0, file_of_last_refresh(folder, metrics, until=plans[0].start - 1))
    for path in dict.fromkeys(files):
        if path is not None:
            yield HealthTable.from_dict(read_json(path, "health file"), f"health file '{path}'")


def read_divergences(path: Path) -> Divergences:
    """Read a divergences file.

    Raises:
        UsageError: if the file is missing, not JSON, or damaged; one line.
    """
    return parse_divergences(read_json(path, "divergences file"), f"divergences file '{path}'")


def parse_divergences(value: Any, source: str = "divergences") -> Divergences:
    """Build from the file's JSON object.

    Raises:
        UsageError: one line that names `source`.
    """
    return read_record(Divergences, value, source, version=2)


def _snip_config(config: dict[str, Any]) -> SnipConfig | None:
    """Return SNIP's settings; those that this version does not have are ignored.

    So are its plugins: who reads a run's files must not import what they name.
    """
    values = config.get("snip")
    if isinstance(values, dict):
        names = SnipConfig.model_fields.keys() - {"plugins"}
        known = {key: value for key, value in values.items() if key in names}
        with contextlib.suppress(UsageError):
            return make_config(known)
    return None


def read_snip_settings(directory: Path) -> SnipConfig | None:
    """Return SNIP's settings of the run in a directory; None without any that can be read."""
    with contextlib.suppress(UsageError):
        return _snip_config(read_yaml(directory / "config.yaml"))
    return None


def plan_spans(path: Path, metrics: MetricRows) -> tuple[PlanSpan, ...]:
    """Return the plans of the run in a directory, in order.

    Raises:
        UsageError: if a plan's file is missing or damaged; one line.
    """
    rows = [row for row in metrics.rows if row.get("plan_iteration") is not None]
    ends = [row["iteration"] for row in rows[1:]] + [metrics.last_iteration + 1]
    plans = {}
    for iteration in {row["plan_iteration"] for row in rows}:
        plans[iteration] = read_plan(path / "plans" / f"{iteration}.json")
    return tuple(
        PlanSpan(
            start=row["iteration"],
            end=end,
            plan=plans[row["plan_iteration"]],
            num_changed=int(row.get("changed_linears") or 0),
            wait_s=float(row.get("wait_s") or 0.0),
            saving_s=row.get("predicted_saving_s"),
            step_s=metrics.mean("step_s", row["iteration"], end),
        )
        for row, end in zip(rows, ends, strict=False)
    )


def _simulated(folder: Path, last_iteration: int, snip: SnipConfig | None) -> bool | None:
    """Return whether the last precision file has simulated linears; None if that is not known."""
    files = [path for at, path in numbered_files(folder).items() if at <= last_iteration]
    if not files:
        return True if snip is not None and snip.backend == "simulate" else None
    path = files[-1]
    value = read_json(path, "precision file")
    try:
        return any("simulate" in linear["backend"] for linear in value["linears"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"precision file '{path}' is damaged ({error!r})") from None


def numbered_files(folder: Path) -> dict[int, Path]:
    """Return {number: path} of the files `<number>.json` in a folder, in ascending order."""
    found = [p for p in folder.glob("*.json") if p.stem.isdecimal() and len(p.stem) <= 10]
    return {int(path.stem): path for path in sorted(found, key=lambda path: int(path.stem))}


def file_of_last_refresh(
    folder: Path, metrics: MetricRows, until: int | None = None
) -> Path | None:
    """Return the file of the run's last refresh, or None.

    A file of an iteration without a refresh in the metrics does not count: it is left over from
    before the run went back to an earlier checkpoint.

    Args:
        folder: holds the files.
        metrics: the run's.
        until: the last iteration that counts; None: the run's.
    """
    ends = metrics.last_iteration if until is None else until
    refreshes = metrics.refreshes
    found = [p for at, p in numbered_files(folder).items() if at in refreshes and at <= ends]
    return found[-1] if found else None
