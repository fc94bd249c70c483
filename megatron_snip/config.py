"""SnipConfig: one object from YAML, `--snip-*` flags and Python.

Every field is a flag (`enabled` is `--snip`): `efficiency_target` is `--snip-efficiency-target` on
the command line and `efficiency_target` in YAML. The text under each field is its help. Unknown
keys are refused.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from megatron_snip.alert_thresholds import AlertThreshold, parse_thresholds
from megatron_snip.errors import UsageError, naming_field
from megatron_snip.files import checked
from megatron_snip.flags import core_type
from megatron_snip.formats import get_format, lowest_precision
from megatron_snip.options import BF16, Granularity, Option, enumerate_options, formats_in
from megatron_snip.plugins import load_plugins
from megatron_snip.target_schedule import Point, parse_points
from megatron_snip.types import ITERATION_LIMIT, Gemm

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=1, lt=ITERATION_LIMIT)]

Backend = Literal["auto", "simulate", "te"]
PipelineBalance = Literal["none", "stage"]
EfficiencyMeasure = Literal["flops", "time"]

AUTO = "auto"
FREE = "free"
"""What a pin gives to linears that the job's own rules fix: they are the planner's again."""

AUTO_FORMATS = ("fp8", "fp4")
"""What `auto` means where GEMMs are simulated. Under Transformer Engine it is two of these and bf16
(linears/auto_formats.py)."""


def _split_pin(pin: str) -> tuple[str, str]:
    glob, _, option = pin.rpartition("=")
    if not glob:
        raise UsageError(f"'{pin}' is not GLOB=OPTION, e.g. 'decoder.layers.0.*=fp8'")
    return glob, option


def _is_path(annotation: Any) -> bool:
    return Path in (annotation, *get_args(annotation))  # Path, or Path | None


class Section(BaseModel):
    """Base of a group of fields: frozen, unknown keys refused, field docstrings are the help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bad_path(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what a shell makes of a variable that is not set: '' would be this folder."""
        name = str(info.field_name)
        if isinstance(value, str) and _is_path(cls.model_fields[name].annotation):
            if not value:
                text = "the path is empty; name one, or leave the setting out"
                raise UsageError(text, field=name)
            if "\0" in value:
                raise UsageError(f"a path cannot have a NUL in it, got {value!r}", field=name)
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse YAML's true, yes and on where a number is wanted: pydantic takes them for 1."""
        name = str(info.field_name)
        if isinstance(value, bool) and core_type(cls.model_fields[name].annotation) in (int, float):
            raise UsageError(f"must be a number, got {str(value).lower()}", field=name)
        return value

    @field_validator("*")
    @classmethod
    def _expand_home(cls, value: Any) -> Any:
        """Expand `~` to the home directory: the shell does not if the path is quoted."""
        if isinstance(value, Path) and str(value).startswith("~"):
            try:
                return value.expanduser()
            except RuntimeError as error:
                raise ValueError(f"'{value}': {error}") from None
        return value


class ScheduleFields(Section):
    """When SNIP measures and plans."""

    enabled: bool = False
    """Turn SNIP on. Off means that the model runs exactly as Megatron runs it."""

    interval: Count = 200
    """Iterations between two refreshes. A refresh measures every linear and requests a new plan."""

    start_step: Count = 100
    """Iteration of the first refresh; the first iteration is 1."""

    lag: Count = 2
    """Iterations from the end of a refresh until its plan is applied. Training continues
    meanwhile. The lag is fixed so that a run can be repeated exactly."""

    collect_only: bool = False
    """Only measure and write at refreshes. Linears run as in the job, with the pins, or by
    --snip-plan-file."""

    eval_precision: Literal["plan", "bf16", "both", "groups"] = "plan"
    """Precision of evaluations: the current plan, or BF16 throughout. `both` runs each microbatch
    in both, and logs the difference of the losses. `groups` also runs it with one group of linears
    at a time in BF16: seven to ten times as long."""


class MeasureFields(Section):
    """What a refresh measures."""

    stat_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Weight of earlier measurements in the running mean of the statistics. The counts of tokens
    and microbatches are not averaged."""

    loss_divergence: str = "norms"
    """Estimator of the loss divergence: `norms`, or what a plugin adds. `norms` bounds the change
    of the loss by errors of fprop, to first order: |G| (|X| |eW| + |eX| |W|) of a linear, from the
    Frobenius norms of its operands and of their errors."""

    weight_divergence: str = "norms"
    """Estimator of the weight divergence: `norms`, which is the same bound for dgrad and wgrad, or
    what a plugin adds."""

    weight_lambda: Annotated[float, Field(ge=0.0, le=1e6)] = 0.01
    """Weight of the normalized weight divergence relative to the loss divergence. With 0.01 a plan
    lowers dgrad and wgrad of all linears before the first fprop, where it may."""


class PlanFields(Section):
    """What the planner may choose and must reach."""

    policy: str = "snip"
    """`snip`, or a baseline such as uniform-fp8 or random; `megatron-snip plan --help` has all."""

    efficiency_target: Share = 0.75
    """Smallest share of the linears' FLOPs in the lowest precision of the formats, 0 to 1. The
    default is 0.75 of the share that the linears can reach."""

    cost: EfficiencyMeasure = "flops"
    """What the target counts: `flops`, or `time`, the share of the seconds that the fastest
    options would save against BF16. With `time` a linear runs BF16 or what is faster there."""

    calibration: Path | Literal["auto"] = "auto"
    """Seconds for --snip-cost time: a file of `megatron-snip calibrate`, or `auto`: measure
    Transformer Engine's linears at the start, and write calibration.json."""

    target_schedule: tuple[str, ...] = ()
    """ITERATION:TARGET, comma separated: the efficiency target from each iteration on, such as
    0:0,200:0.75,9000:0.5; before the first it is --snip-efficiency-target. 9500:~0 is a ramp from
    the point before to 0 at iteration 9500, in steps of at most 0.05."""

    heal_from: Annotated[float, Field(gt=0.0, lt=ITERATION_LIMIT)] | None = None
    """Iteration, or fraction of the run (below 1), from which the target falls in steps; it
    reaches 0 shortly before the end."""

    heal_below_noise: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Heal from the first refresh in which the gradient noise of the plan is above this, such as
    1 (docs/how-it-works.md). With --snip-heal-from as well, what comes first counts."""

    heal_order: Literal["plan", "forward", "backward"] = "plan"
    """What healing raises first: `plan` (what the quality losses say), `forward` (fprop) or
    `backward` (dgrad and wgrad). The last two need `granularity: gemm` and `cost: flops`,
    and refuse `pipeline_balance: stage`."""

    formats: tuple[str, ...] = (AUTO,)
    """Formats that a plan may use, comma separated; the one with the fewest bits is the lowest
    precision. An entry may be an option of several formats, such as fp8-fp4-fp4. `auto`: bf16,fp8
    on Ada and Hopper, fp8,fp4 on Blackwell and in simulation."""

    granularity: Granularity = "linear"
    """`linear`: one format per linear (the paper's). `gemm`: one each for fprop, dgrad, wgrad."""

    backend: Backend = "auto"
    """What runs the linears: `te` (Transformer Engine's recipes), `simulate` (any format on any
    machine, exactly and slowly), or `auto` (`te` for Transformer Engine's linears)."""

    pipeline_balance: PipelineBalance = "none"
    """`stage`: every pipeline stage reaches the target. `none`: only the model as a total
    reaches the target."""

    pins: tuple[str, ...] = ()
    """GLOB=OPTION, comma separated: linears with a fixed option, bf16 or one of the formats, such
    as 'decoder.layers.0.*=fp8'. A linear that cannot run it gets the nearest option of no lower
    precision. Pins go before the job's own rules (--first-last-layers-bf16,
    --te-precision-config-file), and GLOB=free gives what these fix to the planner."""

    small_linears: Literal["plan", "job"] = "plan"
    """Linears so small that a low format may be slower there than BF16. `plan`: the planner
    decides, and one line names them. `job`: they keep what the job runs."""

    change_penalty: Annotated[float, Field(ge=0.0, le=1e150)] = 0.0
    """Price of each linear that changes its option at a refresh, in units of quality loss. The
    uniform plan in the lowest precision has quality loss 1 + weight_lambda."""

    plugins: tuple[str, ...] = ()
    """Modules that add formats, statistics, divergences, policies or writers, comma separated, such
    as our_package.snip. Those that installed packages declare are always used."""

    plan_file: Path | None = None
    """Start with this plan, a plans/<iteration>.json of another run. It must agree with pins and
    formats. On resume it counts only if its plan is new, or with --snip-collect-only."""


class GuardFields(Section):
    """Protection of training against a bad plan."""

    guard: bool = True
    """Watch the loss after a plan change. If it is NaN or jumps, repeat the iteration under the
    former plan, and keep that plan if it helps."""

    guard_sigmas: Annotated[float, Field(ge=0.0, le=1e6)] = 6.0
    """Smallest rise of the loss that counts as a jump, in standard deviations of its noise from
    iteration to iteration. A rise below 20 % of the loss is never a jump."""


class ReportFields(Section):
    """Output."""

    alert: tuple[str, ...] = ()
    """MEASURE>X or MEASURE<X, comma separated, such as 'underflow>0.3': a linear whose measure of
    health is beyond X is logged once, with an alert in W&B. Measures: sqnr_db,
    underflow, saturated, scale_spread, amax, gradient_norm, gradient_noise."""

    output_dir: Path | None = None
    """Directory for plans, problems, divergences and metrics. Default: snip/ below --save,
    or below the working directory."""

    reference: Path | None = None
    """A run, usually in BF16, or its metrics.jsonl: the report shows the gap of the loss to it."""


class SnipConfig(ScheduleFields, MeasureFields, PlanFields, GuardFields, ReportFields):
    """All settings of SNIP; see the groups for the fields.

    Raises:
        pydantic.ValidationError: on an unknown key or a value out of range;
            `make_config` turns it into a one-line `UsageError`.
        UsageError: if settings contradict each other, or a name among them is not known.
    """

    @field_validator("formats", "pins", "target_schedule", "alert", "plugins", mode="before")
    @classmethod
    def _split_commas(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        # This imports the user's modules: formats and policies among the settings may be theirs.
        load_plugins(self.plugins)
        # Each of these reads texts, and raises if they are wrong.
        _ = self.lowest_format
        _ = self.pin_pairs
        _ = self.alerts
        _ = self.points
        if not any(get_format(name).quantized for name in self.named_formats):
            raise UsageError(
                f"'{','.join(self.formats)}' leaves nothing to measure or to choose; add a format "
                "with fewer bits, such as fp8",
                field="formats",
            )
        if self.formats != (AUTO,):
            self.check_pins()
        if self.cost != "time" and self.calibration != AUTO:
            raise UsageError(
                f"'{self.calibration}' holds seconds, which only --snip-cost time counts; add that",
                field="calibration",
            )
        can_order_gemms = self.granularity == "gemm" and self.pipeline_balance != "stage"
        if self.heal_order != "plan" and not can_order_gemms:
            needed = "granularity gemm and a pipeline_balance other than stage"
            text = f"'{self.heal_order}' raises single GEMMs; it needs {needed}"
            raise UsageError(text, field="heal_order")
        # The order is kept by leaving options out; with `time` that would change how many seconds a
        # target asks for.
        if self.heal_order != "plan" and self.cost == "time":
            raise UsageError(
                f"'{self.heal_order}' counts FLOPs, and --snip-cost is time; use heal_order plan, "
                "or cost flops",
                field="heal_order",
            )
        # A plan is applied before the next refresh begins.
        if self.lag >= self.interval and not self.collect_only:
            raise UsageError(
                f"got {self.lag}, must be below interval ({self.interval}); lower it, or raise "
                "interval",
                field="lag",
            )
        return self

    def check_pins(self) -> None:
        """Refuse a pin to an option that the formats do not have; call it once `auto` is resolved.

        Raises:
            UsageError: for the first such pin.
        """
        allowed = (BF16, *self.options)
        for glob, option in self.pin_pairs:
            if option not in allowed:
                raise UsageError(
                    f"'{glob}={option}': {option} is neither bf16 nor an option of formats "
                    f"{','.join(self.formats)} by {self.granularity}",
                    field="pins",
                )

    @property
    @naming_field("formats")
    def format_entries(self) -> tuple[str, ...]:
        """`formats`; for an unresolved `auto` those of simulation. Cost `time` adds bf16."""
        if AUTO in self.formats and len(self.formats) > 1:
            raise UsageError(f"'{AUTO}' stands alone; drop it or the other formats")
        named = AUTO_FORMATS if self.formats == (AUTO,) else self.formats
        if self.cost == "time" and "bf16" not in named:
            return ("bf16", *named)
        return named

    @property
    @naming_field("formats")
    def named_formats(self) -> tuple[str, ...]:
        """The single formats of `format_entries`: `fp8-fp4-fp4` has fp8 and fp4."""
        return formats_in(self.format_entries)

    @property
    def options(self) -> tuple[Option, ...]:
        """What every linear may choose from, in the order of `enumerate_options`."""
        return enumerate_options(self.format_entries, self.granularity)

    @property
    @naming_field("formats")
    def lowest_format(self) -> str:
        """Name of the lowest precision among the formats: what `efficiency_target` counts."""
        return lowest_precision(self.named_formats).name

    @property
    def lowest_formats_label(self) -> str:
        """What to call the formats that count towards the target: `fp4`, or `fp4/nvfp4`."""
        bits = get_format(self.lowest_format).bits
        return "/".join(name for name in self.named_formats if get_format(name).bits == bits)

    @property
    @naming_field("pins")
    def pin_pairs(self) -> tuple[tuple[str, Option], ...]:
        """The pins that fix an option as (glob, option) pairs, in order."""
        split = map(_split_pin, self.pins)
        return tuple((glob, Option.parse(text)) for glob, text in split if text != FREE)

    @property
    @naming_field("pins")
    def free_globs(self) -> tuple[str, ...]:
        """The globs of the pins that give linears back to the planner, in order."""
        return tuple(glob for glob, text in map(_split_pin, self.pins) if text == FREE)

    def allows(self, option: Option) -> bool:
        """Return whether the formats allow an option; bf16 is always allowed.

        By granularity gemm, every GEMM may have every format. By linear, a GEMM may have the
        formats that some entry has in that GEMM: fp8-fp4-fp4 allows fp4 in dgrad and wgrad only.
        """
        if self.granularity == "gemm":
            return set(option.formats) <= {*self.named_formats, "bf16"}
        entries = [BF16, *map(Option.parse, self.format_entries)]
        allowed = {gemm: {entry[gemm] for entry in entries} for gemm in Gemm}
        return all(option[gemm] in allowed[gemm] for gemm in Gemm)

    @property
    def target_changes(self) -> bool:
        """Whether the target changes during the run."""
        heals = self.heal_from is not None or self.heal_below_noise is not None
        return heals or bool(self.target_schedule)

    @property
    @naming_field("target_schedule")
    def points(self) -> tuple[Point, ...]:
        """`target_schedule`, parsed."""
        return parse_points(self.target_schedule)

    @property
    def is_scheduled_from_the_start(self) -> bool:
        """Whether `target_schedule` has a target for the first iteration, and so for every one."""
        points = self.points
        return bool(points) and points[0].iteration <= 1 and not points[0].ramp

    @property
    @naming_field("alert")
    def alerts(self) -> tuple[AlertThreshold, ...]:
        """`alert`, parsed."""
        return parse_thresholds(self.alert)


PATH_SETTINGS = tuple(
    name for name, field in SnipConfig.model_fields.items() if _is_path(field.annotation)
)
"""Settings that are paths of files or directories."""


def make_config(values: dict[str, Any]) -> SnipConfig:
    """Build a SnipConfig from plain values (YAML's or flags').

    Raises:
        UsageError: one line naming the field, what was got and what is wanted.
    """
    return checked(SnipConfig, values, "snip settings")
