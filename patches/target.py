"""Target: a symbol of Megatron's that SNIP needs, and how to tell whether it is the one we know.

A symbol is looked up by name and its signature is read: the parameters that our code binds by name
must be there. Only then does the version count: a release that we have not tested runs with a
warning, because the symbols were found, unless the user wants only tested ones.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_snip.errors import UnsupportedError
from megatron_snip.log import warn_once

logger = logging.getLogger(__name__)

TESTED = ">=0.16,<0.20"
"""Releases of megatron-core in which all seams were tested."""


@dataclass(frozen=True)
class Target:
    """A function of Megatron's, by name.

    Attributes:
        module: importable name, e.g. `megatron.training.training`.
        attribute: name in the module; `Class.method` for a method.
        parameters: names that must be in its signature.
        versions: releases of megatron-core in which it was tested.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...] = ()
    versions: str = TESTED

    def __str__(self) -> str:
        """Return the dotted name."""
        return f"{self.module}.{self.attribute}"

    @property
    def name(self) -> str:
        """The last part of the attribute: what is set on `owner()`."""
        return self.attribute.rsplit(".", 1)[-1]

    def owner(self) -> Any:
        """Import and return the module or class that holds the symbol.

        Raises:
            UnsupportedError: if there is none.
        """
        try:
            owner: Any = importlib.import_module(self.module)
            for part in self.attribute.split(".")[:-1]:
                owner = getattr(owner, part)
        except (ImportError, AttributeError) as error:
            hint = ""
            if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("megatron"):
                hint = (
                    " (megatron.training comes with a Megatron-LM checkout, and with "
                    "megatron-core's wheel from 0.17 on)"
                )
            raise UnsupportedError(f"cannot import {self.module}: {error}{hint}") from None
        return owner

    def find(self) -> Callable[..., Any]:
        """Return the symbol.

        Raises:
            UnsupportedError: if it is missing, or lacks a parameter.
        """
        found = getattr(self.owner(), self.name, None)
        if not callable(found):
            raise UnsupportedError(
                f"megatron-core {core_version()} has no {self}; SNIP needs it ({self._tested})"
            )
        missing = [name for name in self.parameters if not _accepts(found, name)]
        if missing:
            raise UnsupportedError(
                f"{self} of megatron-core {core_version()} takes no {', '.join(missing)}; "
                f"SNIP needs it ({self._tested})"
            )
        function: Callable[..., Any] = found
        return function

    def problem(self) -> str | None:
        """Return why the symbol cannot be used here, or None."""
        try:
            self.find()
        except UnsupportedError as error:
            return str(error)
        return None

    @property
    def _tested(self) -> str:
        return f"tested with {self.versions.replace(',', ', ')}"


def core_version() -> str:
    """Return megatron-core's version, of the checkout or wheel that is imported.

    Raises:
        UnsupportedError: if it cannot be imported.
    """
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise UnsupportedError(
            f"megatron-core cannot be imported ({error}); pip install 'megatron-core{TESTED}', "
            "or run inside a Megatron-LM checkout"
        ) from None
    return str(info.__version__)


def version_is_tested(version: str, specifier: str = TESTED) -> bool:
    """Whether a release (pre-releases and local builds included) is one that was tested."""
    parsed = Version(version)
    return SpecifierSet(specifier).contains(f"{parsed.major}.{parsed.minor}")


def check_version(strict: bool) -> None:
    """Warn once about a release that was not tested, or refuse it.

    Raises:
        UnsupportedError: if `strict` and the release was not tested.
    """
    version = core_version()
    if version_is_tested(version):
        return
    text = f"megatron-core {version} was not tested with SNIP ({TESTED.replace(',', ', ')} were)"
    if strict:
        raise UnsupportedError(f"{text}; drop --snip-strict-version to try it")
    warn_once(logger, f"{text}; its seams were found by name and signature, so SNIP goes on")


def _accepts(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return name in parameters or any_keyword
