"""The one place that states the version, and the versions of other packages."""

import functools
import platform
from importlib import metadata

__version__ = "0.2.0"

PACKAGES = ("megatron-snip", "megatron-core", "torch", "transformer-engine")
"""Packages whose versions decide what a run does and how long its linears take."""


@functools.cache  # a shared file system of many nodes is asked once in a process
def installed_version(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages (None where not installed)."""
    packages = (*PACKAGES, "ortools", "numpy", "wandb")
    found = {package: installed_version(package) for package in packages}
    return {"python": platform.python_version(), **found, "megatron-snip": __version__}
