"""Plugins: modules of other packages that add formats, statistics, divergences, policies, writers.

The import of a plugin adds entries to tables of this package: `formats.FORMATS`,
`statistics.added.STATISTICS`, `LOSS_DIVERGENCES` and `WEIGHT_DIVERGENCES` of
`divergence.quality_loss`, `planning.policies.POLICIES`, `reporting.writers.WRITERS`. It is named by
`--snip-plugins`, or an installed package declares it:

    [project.entry-points."megatron_snip.plugins"]
    ours = "our_package.snip"
"""

import functools
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from megatron_snip.errors import UsageError, one_line
from megatron_snip.log import log_failure

logger = logging.getLogger(__name__)

GROUP = "megatron_snip.plugins"
"""Entry points of this group name modules."""

_loaded: dict[str, None] = {}
"""Modules that were imported, in order."""


def load_plugins(modules: Iterable[str] = ()) -> None:
    """Import the plugins of installed packages, and those that are named; each once.

    Args:
        modules: dotted names of further modules.

    Raises:
        UsageError: if one cannot be imported, or is not the name of a module.
    """
    for name in (*_installed(), *modules):
        if name in _loaded:
            continue
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                f"'{name}' is not the name of a module; write it as in `import our_package.snip`",
                field="plugins",
            )
        try:
            _import(name)
        except (Exception, SystemExit) as error:  # whatever the import of a stranger's module does
            if not isinstance(error, ModuleNotFoundError | SystemExit):  # a script named by mistake
                log_failure(logger, f"importing {name}", error)
            text = f"cannot import '{name}': {type(error).__name__}: {one_line(error)}"
            raise UsageError(f"{text}; install it, or drop it", field="plugins") from error
        _loaded[name] = None


@functools.cache  # finding them opens a file of each installed package
def _installed() -> tuple[str, ...]:
    return tuple(entry.value for entry in metadata.entry_points(group=GROUP))


def _import(name: str) -> None:
    """Import a module; one that is found nowhere else may lie in the current directory.

    Python looks there for `python -m` only. The ranks of a run and the command `megatron-snip` find
    the same plugins so. The directory comes last: it hides no other module.
    """
    try:
        importlib.import_module(name)
        return
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] or os.getcwd() in sys.path:
            raise
    sys.path.append(os.getcwd())
    try:
        importlib.import_module(name)
    except BaseException:
        sys.path.remove(os.getcwd())
        raise


def loaded_plugins() -> tuple[str, ...]:
    """Return the modules that were imported: another process of the run imports them as well."""
    return tuple(_loaded)


def is_of_plugin(module: str) -> bool:
    """Return whether a module is of the top-level package of an imported plugin."""
    return module.partition(".")[0] in {name.partition(".")[0] for name in _loaded}


def place_in_plugin(error: BaseException) -> str | None:
    """Return the last line of a plugin, FILE:LINE, that ran when an error was raised.

    Of an error with causes it is a line of the cause. None: no plugin ran.
    """
    places = [
        f"{frame.f_code.co_filename}:{line}"
        for each in _with_causes(error)
        for frame, line in traceback.walk_tb(each.__traceback__)
        if is_of_plugin(str(frame.f_globals.get("__name__")))
    ]
    return places[-1] if places else None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def plugin_folders() -> tuple[str, ...]:
    """Return the folders in which the top-level packages of imported plugins lie, each once."""
    folders: dict[str, None] = {}
    for name in _loaded:
        package = sys.modules[name.partition(".")[0]]
        if package.__spec__ is None:
            continue
        # A module lies in a folder; a package is one, or several.
        places = package.__spec__.submodule_search_locations or [package.__spec__.origin or ""]
        folders |= {str(Path(place).resolve().parent): None for place in places if place}
    return tuple(folders)
