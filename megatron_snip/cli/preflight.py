"""`megatron-snip preflight SCRIPT ARGS...`: what SNIP would do with a job, before it is queued.

The script runs up to its model, which is built without memory: on any machine, without a GPU.
"""

import argparse
import contextlib
import io
import json
import logging
import math
import os
import re
import runpy
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_snip.cli.common import capability, integer, progress
from megatron_snip.cli.script import check_script, expand
from megatron_snip.errors import UsageError, one_line

if TYPE_CHECKING:  # they import torch, which `run` first hides GPUs from
    from megatron_snip.patches.preflight.examine import Preflight
    from megatron_snip.patches.preflight.job import BuiltJob

EXAMPLES = (
    "megatron-snip preflight --gpus 512 --capability 9.0 pretrain_gpt.py ARGS --snip",
    "megatron-snip preflight --json pretrain_gpt.py @llama-70b.args",
)

_BLACKWELL = re.compile(
    r"mxfp8|nvfp4|--fp4-format|(?<![A-Za-z0-9])(g?b[23]00|vr200)(?![A-Za-z0-9])"
)
"""Words of a command line whose job needs, or names, a GPU that is newer than Hopper."""

_EFFECTS = {"runs": "plans", "restricts": "restricted", "measures": "measures"}
_LABEL = 12
"""Width of the first column."""
_NEAR = 0.01
"""A target this much below what the job runs is not worth a line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "--gpus",
        type=integer,
        metavar="N",
        help="number of GPUs of the job; default: the fewest that its layout needs",
    )
    parser.add_argument(
        "--capability",
        type=capability,
        metavar="X.Y",
        help="compute capability of its GPUs, such as 9.0 (Hopper) or 10.0 (Blackwell); default: "
        "10.0 if the words name MXFP8, NVFP4 or such a GPU, else 9.0",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ARGS",
        help="the script and its arguments, as after python -m megatron_snip",
    )


def run(args: argparse.Namespace) -> int:
    """Print what SNIP would do with the job; return 0, or 2 if the job would be refused.

    Raises:
        UsageError: if the script, or its arguments, build no model.
    """
    words = expand(args.script)
    if not words:
        raise UsageError("needs a script: megatron-snip preflight SCRIPT ARGS")
    name = words[0]
    if is_recipe(name):
        if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
            raise UsageError(
                f"'{name}' is no script, and Megatron-Bridge, whose recipes have such names, is "
                "not installed"
            )
    else:
        check_script(Path(name))
        if not sys.flags.safe_path:  # Megatron is the one that the script would import
            sys.path.insert(0, str(Path(name).resolve().parent))
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise UsageError(
            "preflight builds the job's model, and megatron-core is not installed: run pip install "
            "'megatron-snip[megatron]', or use the job's environment"
        )
    gpus = args.gpus or _gpus_of_recipe(name)
    asked = args.capability or ((10, 0) if any(map(_BLACKWELL.search, words)) else (9, 0))
    with ExitStack() as stack:
        stack.enter_context(_environment())
        stack.enter_context(_quiet())
        # Torch is imported here, after the GPUs of this machine are hidden.
        from megatron_snip.patches.preflight.absent import stand_ins

        stack.enter_context(stand_ins())
        from megatron_snip.patches.preflight.world import gpu_of

        stack.enter_context(gpu_of(asked))
        # A console of its own: while the script runs, sys.stderr is read.
        done = stack.enter_context(progress("building the model", Console(file=sys.stderr)))
        job = built(name, words[1:], gpus, done)
        from megatron_snip.patches.preflight.examine import examine

        found = examine(job)
    if args.capability is None:
        major, minor = asked
        found.unknown.append(f"compute capability {major}.{minor} is assumed: see --capability")
    if gpus is None:
        found.unknown.append(f"{job.num_ranks} GPUs, the fewest of this layout: see --gpus")
    print(json.dumps(asdict(found), indent=1) if args.json else _screen(found, name))
    return 2 if found.refused else 0


def is_recipe(word: str) -> bool:
    """Return whether a command line's first word can only be a recipe of Megatron-Bridge."""
    return re.fullmatch(r"\w+", word) is not None and not Path(word).exists()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Within the block this process is rank 0 of a job, on a machine without GPUs."""
    before = dict(os.environ)
    # The answer is about other GPUs than those of this machine.
    os.environ.update(CUDA_VISIBLE_DEVICES="", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def built(
    script: str,
    words: Sequence[str],
    gpus: int | None,
    on_progress: Callable[[float], None] | None = None,
) -> "BuiltJob":
    """Return a job with its model: run its script until that is built.

    Args:
        script: a script of Megatron-LM or Megatron-Bridge, or a recipe's name.
        words: its command line, with SNIP's flags.
        gpus: number of ranks; None: the fewest that the layout needs.
        on_progress: called with the share of the stages that are built, from 0 to 1.

    Raises:
        UsageError: if the script ends before, with the reason in one line.
    """
    from megatron_snip.patches import arguments
    from megatron_snip.patches.imports import when_imported
    from megatron_snip.patches.megatron_bridge.loop import PRETRAIN
    from megatron_snip.patches.preflight import megatron_bridge, megatron_lm
    from megatron_snip.patches.preflight.job import BuiltJob, Reached
    from megatron_snip.patches.preflight.refusal import refusing
    from megatron_snip.patches.registry import Registry

    line = arguments.read_cli_args(words)
    job = BuiltJob(gpus, line.given, on_progress=on_progress)
    os.environ["WORLD_SIZE"] = str(gpus or 1)
    loops = {
        "megatron.training": megatron_lm.patches(job),
        PRETRAIN: megatron_bridge.patches(job),
    }
    registry = Registry(())
    sys.argv = [script, *line.others]
    errors = io.StringIO()
    with ExitStack() as stack:
        stack.callback(registry.uninstall)
        registry.install({"always"}, [megatron_bridge.no_callback])
        for module, patches in loops.items():
            stack.callback(when_imported(module, partial(registry.install, {"always"}, patches)))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(errors))
        try:
            with refusing("Megatron builds no model"):
                if is_recipe(script):
                    megatron_bridge.run_recipe(script, line.others)
                else:
                    runpy.run_path(script, run_name="__main__")
        except Reached:
            return job
        except SystemExit as end:
            raise UsageError(_end_text(script, end, errors.getvalue())) from None
        except ImportError as error:
            if (error.name or "").partition(".")[0] == "megatron_snip":
                raise
            raise UsageError(f"'{script}' cannot be run here: {one_line(error)}") from error
    raise UsageError(
        f"'{script}' does not reach Megatron-LM's or Megatron-Bridge's pretrain: is it a training "
        "script of Megatron's?"
    )


def _end_text(script: str, end: SystemExit, printed: str) -> str:
    """Return why a script has ended itself: its parser's last line."""
    lines = [line for line in printed.splitlines() if line.strip()]
    if end.code == 2 and lines:
        return f"the arguments are refused: {lines[-1].strip()}"
    return f"'{script}' ends with status {end.code} before it builds a model"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within the block only our own failures are logged: else what matters is in the result."""
    # Bridge logs as an error that the script ends where its model is built. Megatron's handler of
    # the root logger ignores filters, so the handlers are replaced.
    ours = logging.StreamHandler()
    ours.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    ours.addFilter(logging.Filter("megatron_snip"))
    disabled = logging.root.manager.disable
    handlers = logging.root.handlers
    logging.disable(logging.WARNING)
    logging.root.handlers = [ours]
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.root.handlers = handlers
        logging.disable(disabled)


def _gpus_of_recipe(name: str) -> int | None:
    """Return the number of GPUs in a recipe's name, such as 512 in `..._512gpu_h100_...`."""
    match = re.search(r"_(\d+)gpu_", name)
    return int(match[1]) if is_recipe(name) and match is not None else None


def _screen(found: "Preflight", script: str) -> str:
    """Return what is printed: a line, which is wrapped, for each subject."""
    layout = ", ".join(f"{name} {size}" for name, size in found.layout.items() if name != "ranks")
    lines = [(f"{found.layout['ranks']} ranks", f"{layout}; {found.machine}")]
    lines += [("linears", _linears(found)), ("the job", _shares(found))]
    for row in found.flags:
        if row["effect"] != "refuses":
            lines.append((_EFFECTS[row["effect"]], f"{row['flag']}: {row['text']}"))
    for source, row in found.fixed.items():
        lines.append(("fixed", f"{row['linears']} by {source}, such as {row['example']}"))
    if found.formats:
        why = f" ({found.formats_why})" if found.formats_why else ""
        lines.append(("choice", f"{','.join(found.formats)}{why}"))
    lines += [("", f"{name}: {text}") for name, text in found.recipes.items()]
    if found.only_measures:
        lines.append(("target", "none: the run measures and makes no plans"))
    elif "runs" in found.target:
        lines.append(("target", _target(found)))
    lines += _costs(found)
    lines += [("warning", text) for text in found.warnings]
    lines += [("hint", text) for text in found.hints]
    lines += [("not known", text) for text in found.unknown]
    lines += [("refused", text) for text in found.refused or ["nothing"]]
    if not found.refused:
        lines.append(("next", _next(found, script)))
    width = max(shutil.get_terminal_size((100, 24)).columns, 60)
    return "\n".join(
        textwrap.fill(
            text,
            width,
            initial_indent=f"{label:{_LABEL}}",
            subsequent_indent=" " * _LABEL,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for label, text in lines
    )


def _linears(found: "Preflight") -> str:
    linears = found.linears
    if not linears:
        return "none found"
    text = f"{linears['all']}"
    if linears["of experts"]:
        text += f", {linears['of experts']} of them of {linears['experts']} experts each"
    largest = max(linears["parameters of a rank"]) / 1e9
    stages = linears["by stage"]
    if len(stages) > 1:
        text += f", {min(stages.values())} to {max(stages.values())} on a pipeline stage"
    sharded = ", before FSDP shards them" if linears["sharded by FSDP"] else ""
    return f"{text}; at most {largest:.3g} billion parameters on a rank{sharded}"


def _shares(found: "Preflight") -> str:
    shares = sorted(found.job.items(), key=lambda pair: -pair[1])
    parts = [f"{100 * share:.1f} % in {option}" for option, share in shares]
    return f"runs of the linears' FLOPs {', '.join(parts)}" if parts else "not known"


def _target(found: "Preflight") -> str:
    target = found.target
    runs, least, best, own = (target[name] or 0.0 for name in ("runs", "least", "best", "job"))
    lowest = found.formats[-1]
    text = f"{runs:.3g} of the FLOPs in {lowest}; plans reach {least:.3g} to {best:.3g}"
    if own > runs + _NEAR:
        text += (
            f"; the job itself runs {own:.3g} there, so this moves {100 * (own - runs):.0f} % of "
            f"the FLOPs to {found.formats[0]}"
        )
        if (higher := _higher_target(found)) is not None:
            text += f"; --snip-efficiency-target {higher} moves fewer"
    return text


def _higher_target(found: "Preflight") -> float | None:
    """Return a target that keeps more of what the job runs in the lowest precision, if it may."""
    own, best, runs = (found.target.get(name) or 0.0 for name in ("job", "best", "runs"))
    target = math.floor(90 * min(own, best)) / 100
    return target if target > runs + _NEAR else None


def _costs(found: "Preflight") -> list[tuple[str, str]]:
    lines = []
    if found.memory_gib:
        gib = found.memory_gib
        lines.append(
            (
                "memory",
                f"computed, without recomputation, on the rank with the most: a plan at the target "
                f"{gib['at target']:+.2f} GiB, all linears in the lowest precision "
                f"{gib['lowest']:+.2f}, in the highest {gib['highest']:+.2f}; a measured iteration "
                f"{gib['measuring']:+.2f}",
            )
        )
    if found.measuring:
        cost = found.measuring
        least, most = cost["ratio"]
        shares = [f"{100 * share:.2g}" for share in cost["share"]]
        lines.append(
            (
                "measuring",
                f"{cost['measured']} of {cost['microbatches']} microbatches of a rank; such an "
                f"iteration takes at most {least} to {most} normal ones, {' to '.join(shares)} % "
                "of the run (computed from an H200's with release 0.2.0, which measured more)",
            )
        )
    if found.control_s:
        seconds = found.control_s
        lines.append(
            (
                "control",
                f"24 bytes an iteration; start {seconds['start']:.2g} s, refresh "
                f"{seconds['refresh']:.2g} s, plan {seconds['apply']:.2g} s (computed from one "
                "machine's)",
            )
        )
    return lines


def _next(found: "Preflight", script: str) -> str:
    flags = "--snip"
    higher = _higher_target(found)
    if found.target.get("given") is None and higher is not None:
        flags += f" --snip-efficiency-target {higher}"
    return f"torchrun ... -m megatron_snip {script} ARGS {flags}"
