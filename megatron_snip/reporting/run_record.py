"""A run directory as records for reports; `run_directory.py` describes the files.

A run in progress is read up to its last complete line. Where a resumed run went back
(metrics_file.py), files of iterations that were not repeated yet are left out as well. Files are
not trusted: each one is checked, and a bad one is refused in one line.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from megatron_snip.config import SnipConfig, make_config
from megatron_snip.directory import check_plain
from megatron_snip.errors import UsageError
from megatron_snip.files import (
    Label,
    read_json,
    read_record,
    read_yaml,
)
from megatron_snip.options import BF16
from megatron_snip.planning.plan import PrecisionPlan, read_plan
from megatron_snip.planning.problem import PlanningProblem, parse_option, read_problem
from megatron_snip.reporting.metrics_file import Count, MetricRows, Number, read_metrics
from megatron_snip.statistics.health_table import HealthTable

logger = logging.getLogger(__name__)

_OptionName = Annotated[str, AfterValidator(lambda text: str(parse_option(text)))]


class _FormatStatistics(BaseModel, strict=True):
    """The sums of one format: what plugins added. All others are in `read_statistics`."""

    added: dict[Label, Number] = {}


class _Statistics(BaseModel, strict=True):
    formats: dict[str, _FormatStatistics] = {}


class LinearRecord(BaseModel, strict=True):
    """One linear of a divergences file.

    Attributes:
        name: Name of the linear.
        options: Values by option and measure; None where a value could not be measured.
        statistics: The sums behind the values; `formats` has them by format.
    """

    name: Label
    options: dict[_OptionName, dict[str, Number]]
    statistics: _Statistics = _Statistics()


class Divergences(BaseModel, strict=True):
    """divergences/<iteration>.json.

    Attributes:
        iteration: The measured iteration.
        loss: Loss of that iteration.
        linears: The linears in the model's order.
    """

    iteration: Count
    loss: Number = None
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
        fixed: The linears whose option is fixed, by name: (option, what fixes it); empty if that is
            not known.
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
    fixed: dict[str, tuple[str, str]]

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
    simulated, fixed = _precision(path / "precision", metrics.last_iteration, snip)
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
        simulated=simulated,
        fixed=fixed,
    )


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
    return read_record(Divergences, value, source, version=3, older=2)


def _snip_config(config: dict[str, Any]) -> SnipConfig | None:
    """Return SNIP's settings; those that this version does not have are ignored.

    So are its plugins: who reads a run's files must not import what they name. And so are its
    alerts, whose measures may be those of another version.
    """
    values = config.get("snip")
    if isinstance(values, dict):
        names = SnipConfig.model_fields.keys() - {"plugins", "alert"}
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


def _precision(
    folder: Path, last_iteration: int, snip: SnipConfig | None
) -> tuple[bool | None, dict[str, tuple[str, str]]]:
    """Return `simulated` and `fixed` of a `RunRecord`, by the last precision file."""
    files = [path for at, path in numbered_files(folder).items() if at <= last_iteration]
    if not files:
        return True if snip is not None and snip.backend == "simulate" else None, {}
    path = files[-1]
    value = read_json(path, "precision file")
    try:
        linears = value["linears"]
        simulated = any("simulate" in linear["backend"] for linear in linears)
        fixed = {
            str(linear["name"]): (str(linear["option"]), str(linear["fixed"]))
            for linear in linears
            if linear.get("fixed") is not None  # version 1 has none
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"precision file '{path}' is damaged ({error!r})") from None
    return simulated, fixed


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
