"""`python -m megatron_snip [--cpu] SCRIPT ARGS...`: an unmodified script of Megatron's, with SNIP.

    python pretrain_gpt.py ARGS   ->   python -m megatron_snip pretrain_gpt.py ARGS --snip

The script runs as `__main__` with its own `sys.argv` and its own directory first on `sys.path`, as
Python would run it; Megatron is therefore the one that the script would import. Scripts are those
of Megatron-LM and of Megatron-Bridge. Their own words and SNIP's flags come after the script's
name; SNIP's are taken off before the script starts. `@FILE` there stands for the words in a file:

    python -m megatron_snip pretrain_gpt.py @model.args @layout.args --lr 1e-4

A line of the file holds any number of words, quoted as in a shell; `#` begins a comment. Within a
file `@` has no meaning. Later words win, as they do on the command line.
"""

import ast
import logging
import os
import runpy
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron_snip.errors import UsageError, shown
from megatron_snip.log import launched_rank

CPU_FLAG = "--cpu"

MAX_BYTES = 1 << 20
"""Largest argument file: hundreds of times the longest launch script."""


def is_script(words: Sequence[str]) -> bool:
    """Whether the command line names a script to run and not a subcommand.

    Args:
        words: The command line, not empty; its first word is no subcommand.

    Raises:
        UsageError: if a script follows other words.
    """
    if words[0] == CPU_FLAG or words[0].endswith(".py") or Path(words[0]).is_file():
        return True
    for script in words:
        if script.endswith(".py"):
            raise UsageError(
                f"'{words[0]}' comes before the script; the order is: torchrun ... -m "
                f"megatron_snip [{CPU_FLAG}] {script} ARGS --snip"
            )
    return False


def prepare_script(words: Sequence[str]) -> Path:
    """Stand in for `python SCRIPT` and install the patches that the command line asks for.

    Args:
        words: The command line `[--cpu] SCRIPT ARGS...`.

    Returns:
        The script, for `run_script`.

    Raises:
        UsageError: if there is no such script, or no such `@FILE`, or if the script is a file of
            data.
        SystemExit: with status 2 on a bad flag, or if Megatron lacks a function that SNIP needs.
    """
    on_cpu = words[0] == CPU_FLAG
    rest = expand(words[1:] if on_cpu else words)
    if not rest:
        raise UsageError(f"{CPU_FLAG} needs a script: python -m megatron_snip {CPU_FLAG} SCRIPT")
    script = Path(rest[0])
    check_script(script)
    sys.argv = rest  # as `python SCRIPT` would set both
    if not sys.flags.safe_path:  # python -P keeps scripts' directories out
        sys.path[0] = str(script.resolve().parent)
    _show_our_log()
    if on_cpu:
        from megatron_snip.patches import cpu

        # Megatron insists on it under tensor parallelism, for the order of CUDA kernels.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        cpu.install(claim_cuda=True)
    from megatron_snip.patches.install import install_for

    start = ["-m", "megatron_snip", *([CPU_FLAG] if on_cpu else [])]
    sys.argv[1:] = install_for(rest[1:], start)
    return script


def check_script(script: Path) -> None:
    """Refuse a file that cannot be read, and one without `.py` that is no Python.

    A script imports something. JSON can be Python, but imports nothing.

    Raises:
        UsageError: if there is no such script, or it is a file of data.
    """
    if not script.is_file():
        raise UsageError(f"cannot find the script '{script}'")
    try:
        with script.open("rb") as stream:
            text = stream.read(MAX_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read the script '{script}': {error.strerror}") from None
    if script.suffix.startswith(".py"):  # its errors are its own
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # of "\/", which is JSON
            statements = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        statements = []
    if not any(isinstance(each, ast.Import | ast.ImportFrom) for each in statements):
        raise UsageError(
            f"'{script}' is no Python script; a command comes before its file: megatron-snip "
            f"COMMAND {script}"
        )


def run_script(script: Path) -> int:
    """Run a prepared script as `__main__`; what it raises, `SystemExit` included, is its own.

    Where it ends without Megatron's parser, or refuses its flags, one more line names the cause.
    """
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ImportError as error:
        _explain_import(script, error)
        raise
    except AssertionError as error:
        if "requires CUDA" not in str(error):
            raise
        # In Megatron's initialization, before its flags are read; its traceback adds nothing.
        if launched_rank() == 0:
            _print_error(
                f"this machine has no GPU; to run without one, {CPU_FLAG} comes before the script: "
                f"-m megatron_snip {CPU_FLAG} {script} ..."
            )
        raise SystemExit(2) from None
    except SystemExit as end:
        flags_were_refused = end.code == 2
        if not _explain_unreached(script) and flags_were_refused and CPU_FLAG in sys.argv:
            _print_error(
                f"{CPU_FLAG} comes before the script: -m megatron_snip {CPU_FLAG} {script} ..."
            )
        raise
    _explain_unreached(script)
    return 0


def _explain_unreached(script: Path) -> bool:
    """Print an error if SNIP's flags had no effect, because the script never reached a loop."""
    from megatron_snip.patches.install import REGISTRY

    session = REGISTRY.session
    if not session.given or session.found_megatron:
        return False
    _print_error(
        f"'{script}' reached neither Megatron-LM's nor Megatron-Bridge's pretrain, so SNIP did "
        "nothing; a training loop of your own calls SnipController, see docs/extending.md"
    )
    return True


def _explain_import(script: Path, error: ImportError) -> None:
    """Print an error if a script imports what the installed Megatron-Bridge does not have."""
    if (error.name or "").startswith("megatron.bridge."):
        from megatron_snip.version import installed_version

        _print_error(
            f"megatron-bridge {installed_version('megatron-bridge')} does not have what '{script}' "
            f"imports from {error.name}; install the release that the script was written for"
        )


def _print_error(text: str) -> None:
    print(f"megatron-snip: error: {shown(text)}", file=sys.stderr)


def expand(words: Sequence[str]) -> list[str]:
    """Return `words` with every `@FILE` replaced by the words in FILE.

    Raises:
        UsageError: if a file cannot be read, is longer than `MAX_BYTES`, is not UTF-8, or has an
            open quote.
    """
    expanded = []
    for word in words:
        named = word.startswith("@") and len(word) > 1
        expanded += read_argument_file(Path(word[1:])) if named else [word]
    return expanded


def read_argument_file(path: Path) -> list[str]:
    """Return the words of a file or pipe; see `expand`."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(f"the argument file '{path}' is larger than {MAX_BYTES >> 20} MiB")
        lines = data.decode("utf-8").splitlines()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the argument file '{path}': {reason}") from None
    words = []
    for line in lines:
        try:
            words += shlex.split(line, comments=True)
        except ValueError:
            text = f"the argument file '{path}' has an open quote in '{line.strip()}'"
            raise UsageError(text) from None
    return words


def _show_our_log() -> None:
    """Print this package's log lines until logging is configured."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    logger = logging.getLogger("megatron_snip")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
