"""Which options the linears of a model can run here, as all ranks agree. Nothing is logged here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from megatron_snip.collectives import gather_json
from megatron_snip.config import SnipConfig
from megatron_snip.errors import UnsupportedError
from megatron_snip.options import Option
from megatron_snip.planning.planner import Refusals, reasons

if TYPE_CHECKING:
    from megatron_snip.linears.model import AnyLinear, PlannedModel


@dataclass(frozen=True)
class AvailableOptions:
    """What the linears of a model can run; the same on all ranks.

    Attributes:
        options: those of the settings that some linear can run, in the settings' order.
        refusals: which linears cannot run an option, and why.
        warnings: one line per option that some or all linears cannot run.
        notes: one line per format that runs as a neighboring one.
    """

    options: tuple[Option, ...]
    refusals: Refusals
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def available_options(model: PlannedModel, config: SnipConfig) -> AvailableOptions:
    """All ranks: return what the linears can run of the settings' options.

    With `collect_only` and no plan file all options are returned: they are measured for other
    machines.

    Raises:
        UnsupportedError: on every rank, if no linear can run the lowest precision, so that the
            efficiency target would have no meaning.
    """
    if config.collect_only and config.plan_file is None:
        return AvailableOptions(config.options, {})
    lowest = Option.uniform(config.lowest_format)
    control = model.runtime.topology.control
    refusals = option_refusals(model.linears, (*config.options, lowest), control)
    num_linears = len(model.all_linears)
    options = tuple(o for o in config.options if len(refusals[o]) < num_linears)
    warnings = []
    for option in config.options:
        if refusals[option]:
            refused = f"{len(refusals[option])} of {num_linears} linears"
            which = refused if option in options else "any linear"
            warnings.append(f"{option} is not available to {which}: {reasons(refusals[option])}")
    if not any(option.share_in(config.lowest_format) for option in options):
        raise UnsupportedError(
            f"no linear of this model can run {lowest}, the lowest precision of --snip-formats: "
            f"{reasons(refusals[lowest])}; choose other formats or use --transformer-impl local"
        )
    notes = tuple(model.approximations(options))
    return AvailableOptions(options, refusals, tuple(warnings), notes)


def option_refusals(
    linears: Sequence[AnyLinear], options: Iterable[Option], control: ProcessGroup | None
) -> dict[Option, dict[str, str]]:
    """All ranks, with the same options: return which linears of the model cannot run them.

    Args:
        linears: this rank's.
        options: in the same order on all ranks.
        control: group of all ranks, or None for one.
    """
    distinct = list(dict.fromkeys(options))
    own = [
        {
            linear.placement.name: why
            for linear in linears
            if (why := linear.refusal(option)) is not None
        }
        for option in distinct
    ]
    found: dict[Option, dict[str, str]] = {option: {} for option in distinct}
    for rank in gather_json(own, control):
        for option, refused in zip(distinct, rank, strict=True):
            found[option].update(refused)
    return found
