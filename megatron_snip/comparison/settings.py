"""ComparisonConfig: what is compared, as a YAML file and flags.

    output: runs/compare
    train: {num_layers: 6, ...}          of `megatron-snip train`, for every run
    forks: {base_steps: 300, steps: 48}  how runs branch off a common beginning
    contenders: {snip-sharp: {weight_lambda: 0.01}}

Everything that is a number or a list is a flag as well; flags win. Unknown keys are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatron_snip.comparison.contender import (
    BASELINE,
    DEFAULT,
    Contender,
    make_contender,
    resolve,
)
from megatron_snip.config import explain, read_yaml
from megatron_snip.errors import UsageError
from megatron_snip.formats import get_format
from megatron_snip.trainer.config import TrainConfig, make_train_config

Count = Annotated[int, Field(ge=1)]
Target = Annotated[float, Field(ge=0.0, le=1.0)]
Mode = Literal["forks", "scratch"]

OWNED = frozenset(
    {"run_dir", "save", "load", "save_interval", "ckpt_step", "exit_interval", "train_iters"}
    | {"overwrite", "eval_interval"}
)
"""Settings of a run that the comparison sets itself."""

_FROZEN = ConfigDict(
    frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
)


class Branching(BaseModel):
    """How runs of a mode branch: a base in BF16, then each contender from its checkpoint."""

    model_config = _FROZEN

    base_steps: Count = 300
    """Steps that all contenders have in common, in BF16."""

    steps: Count = 48
    """Steps of each contender after them."""

    interval: Count | None = None
    """Steps between refreshes; without one the first plan stays."""

    own_base: bool = False
    """Every seed has a base of its own (initial weights and data). Otherwise seeds share one
    base, and differ in the data that follow and in the seed of rounding."""

    eval_interval: Count | None = None
    """Steps between evaluations; by default there is one at the end."""

    cooldown: bool = False
    """The learning rate of the branches falls linearly from the base's, which is constant, to
    zero at their end. At a constant rate two runs that differ by a rounding drift apart within
    tens of steps, and the loss at any one step is mostly that drift; at the end of a cooldown it
    is the loss of the valley that the weights are in."""


class ComparisonFields(BaseModel):
    """What is compared."""

    model_config = _FROZEN

    output: Path = Path("runs/compare")
    """Directory of all runs, tables and curves. A comparison that finds finished runs in it does
    not make them again."""

    modes: Annotated[tuple[Mode, ...], Field(min_length=1)] = ("forks",)
    """`forks`: short runs from a checkpoint. `scratch`: runs from a BF16 warm-up of each seed."""

    lowest: Annotated[tuple[str, ...], Field(min_length=1)] = ("fp4",)
    """Lowest formats, a table each: fp4, or the stress format fp3."""

    gentle: str = "fp8"
    """The format that is on offer beside the lowest."""

    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = (0.75,)
    """Shares of linear FLOPs in the lowest format, a table each."""

    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    """Repetitions; all contenders of one see the same data."""

    policies: tuple[str, ...] = DEFAULT
    """Contenders."""

    jobs: Count = 2
    """Runs at a time."""

    threads: Count = 1
    """Threads of each run."""

    calibration: Path | None = None
    """A table of `megatron-snip calibrate`: step times are predicted for its machine as well."""

    @field_validator("modes", "lowest", "targets", "policies", mode="before")
    @classmethod
    def _split_commas(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value


class ComparisonConfig(ComparisonFields):
    """All of a comparison's settings.

    Raises:
        pydantic.ValidationError: on an unknown key or a value out of range.
    """

    train: dict[str, Any] = {}
    """Settings of `megatron-snip train` that all runs share, with `snip` below."""

    forks: Branching = Branching()
    """See `modes`."""

    scratch: Branching = Branching(base_steps=20, steps=300, interval=100, own_base=True)
    """See `modes`."""

    contenders: dict[str, dict[str, Any]] = {}
    """Further contenders: a name, and SNIP's settings that it changes."""

    def branching(self, mode: str) -> Branching:
        """Return how a mode's runs branch."""
        return self.forks if mode == "forks" else self.scratch

    def contender(self, name: str, lowest: str) -> Contender:
        """Return a contender by name.

        Raises:
            UsageError: if there is none of that name.
        """
        added = {key: make_contender(key, values) for key, values in self.contenders.items()}
        return resolve(name, lowest, added)

    def train_config(self) -> TrainConfig:
        """Return what all runs share.

        Raises:
            UsageError: if a setting is wrong.
        """
        return make_train_config(self.train)


def make_comparison(values: dict[str, Any]) -> ComparisonConfig:
    """Build and check a configuration from plain values.

    Raises:
        UsageError: one line naming the field, what was got and what is wanted.
    """
    try:
        config = ComparisonConfig(**values)
    except ValidationError as error:
        raise UsageError(f"comparison settings: {explain(error)}") from None
    owned = sorted(OWNED & set(config.train))
    if owned:
        raise UsageError(f"comparison settings: train.{owned[0]} is set by the comparison itself")
    for name in (*config.lowest, config.gentle):
        get_format(name)
    for name in (*config.contenders, *config.policies):
        config.contender(name, config.lowest[0])
    if BASELINE not in config.policies:
        raise UsageError(f"policies must hold '{BASELINE}', which gaps are counted from")
    train = config.train_config()
    for mode in config.modes:
        if config.branching(mode).cooldown and train.lr_decay_style != "constant":
            raise UsageError(
                f"{mode}.cooldown needs train.lr_decay_style constant, got {train.lr_decay_style}"
            )
    return config


def load_comparison(file: Path | None, flags: dict[str, Any]) -> ComparisonConfig:
    """Join a YAML file and flags; flags win.

    Raises:
        UsageError: one line naming the file or field and what is wrong.
    """
    values = {} if file is None else read_yaml(file)
    return make_comparison({**values, **flags})
