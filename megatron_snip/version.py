"""The one place that states the version, and the versions of other packages."""

from importlib import metadata

__version__ = "0.1.0"

PACKAGES = ("megatron-snip", "megatron-core", "torch", "transformer-engine")
"""Packages whose versions decide what a run does and how long its linears take."""


def installed_version(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
