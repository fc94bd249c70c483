"""Patches: functions of Megatron's that SNIP wraps, and the registry that installs them.

    @patch("megatron.training.training", "train_step", needs=("iteration",), ...)
    def train_step(call: Call, session: Session) -> Any:
        ...                   # call.arguments: by name; changes reach the original
        return call.run()     # the original

A patch replaces one attribute of a module or class, by name, and never copies the original's body.
One without a handler only checks that the function is there. All symbols of one `install`
and their parameters are checked before the first one is replaced. A release that was not tested
then runs with a warning. `uninstall` restores the original objects. (The folder patches/ is
installed as `megatron_snip.patches`.)
"""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_snip.errors import UnsupportedError
from megatron_snip.log import warn_once_per_job

if TYPE_CHECKING:  # the controller imports Megatron; without --snip nothing needs it
    from megatron_snip.config import SnipConfig
    from megatron_snip.patches.graphs import Graphs
    from megatron_snip.patches.step import StepMetrics
    from megatron_snip.run.controller import SnipController

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Package:
    """A package of Megatron's that is patched.

    Attributes:
        name: the package's name, as pip knows it.
        module: the module that holds its `package_info`.
        tested: the releases that were tested with SNIP.
    """

    name: str
    module: str
    tested: str

    @property
    def version(self) -> str:
        """The release that is imported.

        Raises:
            UnsupportedError: if there is none.
        """
        try:
            return str(pkgutil.resolve_name(f"{self.module}.package_info:__version__"))
        except ImportError as error:
            raise UnsupportedError(
                f"cannot import {self.name} ({error}); run pip install '{self.name}{self.tested}', "
                "or run inside a checkout of it"
            ) from None

    @property
    def release(self) -> str:
        """Its name and version, without what a checkout adds to it."""
        return f"{self.name} {Version(self.version).public}"

    def is_tested(self, version: str) -> bool:
        """Return whether a release was tested; its pre-releases and local builds count."""
        return SpecifierSet(self.tested).contains(Version(version).base_version)


CORE = Package("megatron-core", "megatron.core", ">=0.16,<0.21")
"""It stands for Megatron-LM as well: both have the same version numbers. Of 0.20 the development
branch was tested."""

BRIDGE = Package("megatron-bridge", "megatron.bridge", ">=0.6,<0.7")
"""Older ones, from 0.3 on, have the functions too; they run with a warning."""

Mode = Literal["always", "--snip", "--cpu"]
"""The runs that a patch is for: all that `install` is called for ("always"), those with SNIP, or
those without a GPU."""

_ABSENT = object()


@dataclass
class Session:
    """What the patches of a process share, until they are uninstalled.

    Attributes:
        given: settings of the command line, by name (`CommandLine.given`).
        with_snip: whether the patches of runs with SNIP are installed.
        config: settings of a SnipCallback, which take the place of flags, or None.
        settings: the settings, built and checked beside the job's; None before that.
        has_callback: whether the script has created a SnipCallback.
        found_megatron: whether the script turned out to be one of Megatron's: it has reached
            Megatron-LM's parser or Megatron-Bridge's loop.
        args: under Megatron-Bridge the job's settings, noted before the model is built; else None.
        makes_plans: whether linears may change; False if SNIP only measures.
        controller: attached to the model, or None.
        loaded_state: SNIP's state in the checkpoint that Megatron has loaded, or None.
        evaluating: what runs Megatron's forward-backward function within an evaluation; None
            outside of one.
        evaluates_test_set: whether an evaluation of the test set runs.
        metrics: collects the metrics of an iteration; None without a controller.
        graphs: CUDA graphs and the plans under which they were captured; None without a controller.
        graph_helpers: Megatron's objects that capture layers in CUDA graphs, each with the
            arguments of its constructor, from which it is made again.
        is_over: whether the patches were uninstalled.
    """

    given: dict[str, Any] = field(default_factory=dict)
    with_snip: bool = False
    config: SnipConfig | None = None
    settings: SnipConfig | None = None
    has_callback: bool = False
    found_megatron: bool = False
    args: Namespace | None = None
    makes_plans: bool = True
    controller: SnipController | None = None
    loaded_state: dict[str, Any] | None = None
    evaluating: Callable[..., Any] | None = None
    evaluates_test_set: bool = False
    metrics: StepMetrics | None = None
    graphs: Graphs | None = None
    graph_helpers: dict[Any, dict[str, Any]] = field(default_factory=dict)
    is_over: bool = False

    def end(self) -> None:
        """Close the controller, if there is one, and forget the training run."""
        controller = self.controller
        self.controller = None
        self.loaded_state = None
        self.metrics = None
        self.graphs = None
        self.graph_helpers.clear()
        if controller is not None:
            controller.close()


class Call:
    """One call of a patched function.

    Attributes:
        arguments: the arguments that were passed, by name; changes reach the original.
    """

    def __init__(self, patch: Patch, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Bind a call; raises TypeError as the call itself would."""
        self._patch = patch
        self._function = function
        signature = inspect.signature(function)
        self.arguments: dict[str, Any] = signature.bind(*args, **kwargs).arguments
        self._kinds = {name: p.kind for name, p in signature.parameters.items()}
        self._by_position = self.arguments.keys() - kwargs.keys()

    def run(self) -> Any:
        """Call the original, with each argument by position or by name as it was passed.

        Raises:
            UnsupportedError: if it returns fewer items than the handler reads.
        """
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, value in self.arguments.items():
            kind = self._kinds[name]
            if kind is Parameter.VAR_POSITIONAL:
                args += value
            elif kind is Parameter.VAR_KEYWORD:
                kwargs |= value
            elif name in self._by_position:
                args.append(value)
            else:
                kwargs[name] = value
        result = self._function(*args, **kwargs)
        num_items = len(result) if isinstance(result, tuple) else 0
        if num_items < self._patch.returns:
            got = num_items or type(result).__name__
            what = f"that returns {got}, not {self._patch.returns} items or more"
            raise self._patch.unsupported(f"has {self._patch.target} {what}")
        return result


Handler = Callable[[Call, Session], Any]


@dataclass(frozen=True)
class Patch:
    """One function of Megatron's that SNIP needs.

    Attributes:
        module: the module that holds the function, e.g. `megatron.training.training`.
        attribute: the function's name there; `Class.method` for a method.
        needs: parameters that its signature must have.
        returns: items of the tuple that it must return, where the handler reads them; else 0.
        when: the runs that it is for.
        optional: it is left out where the function or a parameter is missing.
        handler: runs in place of each call; None if SNIP replaces the function elsewhere, on
            instances or for a while.
    """

    module: str
    attribute: str
    needs: tuple[str, ...]
    returns: int = 0
    when: Mode = "--snip"
    optional: bool = False
    handler: Handler | None = None

    @property
    def package(self) -> Package:
        """The package of the module."""
        return BRIDGE if self.module.startswith(f"{BRIDGE.module}.") else CORE

    @property
    def target(self) -> str:
        """The dotted name of the function."""
        return f"{self.module}.{self.attribute}"

    def find(self) -> tuple[Any, Callable[..., Any]]:
        """Return the function's owner (module or class) and the function.

        Raises:
            UnsupportedError: if it is missing or lacks a parameter.
        """
        path, _, name = self.attribute.rpartition(".")
        try:
            owner = pkgutil.resolve_name(f"{self.module}:{path}")
            function: Callable[..., Any] = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            # Megatron is there and lacks a package that it imports itself.
            if absent is not None and absent.partition(".")[0] != "megatron":
                raise UnsupportedError(
                    f"cannot import {self.module} of {self.package.release} ({error}); "
                    "run pip install 'megatron-snip[megatron]'"
                ) from None
            hint = ""
            if absent is not None:
                hint = (
                    "; megatron.training is in a Megatron-LM checkout and in the wheel from 0.17 on"
                )
            raise self.unsupported(f"has no {self.target} ({error})", hint) from None
        parameters = inspect.signature(function).parameters
        missing = [name for name in self.needs if name not in parameters]
        if missing:
            found = f"{self.target}({', '.join(parameters)})"
            raise self.unsupported(f"has {found} without {', '.join(missing)}")
        return owner, function

    def problem(self) -> str | None:
        """Return why the patch cannot be installed here, or None."""
        try:
            self.find()
        except UnsupportedError as error:
            return str(error)
        return None

    def wrapper(self, function: Callable[..., Any], session: Session) -> Callable[..., Any]:
        """Return what takes the place of `function`."""
        handler = self.handler
        assert handler is not None

        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if session.is_over:  # another tool has wrapped this function, and still calls it
                return function(*args, **kwargs)
            return handler(Call(self, function, args, kwargs), session)

        return patched

    def unsupported(self, what: str, hint: str = "") -> UnsupportedError:
        """Return the error of a release that does not fit; `what` follows its version."""
        return UnsupportedError(
            f"{self.package.release} {what}; use a release that SNIP supports "
            f"({self.package.tested}){hint}"
        )


def patch(
    module: str, attribute: str, needs: tuple[str, ...] = (), **fields: Any
) -> Callable[[Handler], Patch]:
    """Return a decorator that makes a handler a `Patch`; the arguments are its attributes."""
    return lambda handler: Patch(module, attribute, needs, handler=handler, **fields)


def replace_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a module or class.

    Returns:
        A function that puts the former object back, unless the attribute was replaced again.
    """
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name) is not value:
            return
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


class Registry:
    """The patches of one process.

    Attributes:
        patches: what may be installed, in order.
        session: what the patches share.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.patches = tuple(patches)
        self.session = Session()
        self._installed: dict[str, Callable[[], None]] = {}
        self._uninstall_actions: list[Callable[[], None]] = []

    @property
    def installed(self) -> frozenset[str]:
        """Dotted names of the functions that are replaced now."""
        return frozenset(self._installed)

    def install(self, asked: Collection[Mode], patches: Sequence[Patch] | None = None) -> None:
        """Install the patches that are asked for; those that are installed stay as they are.

        Args:
            asked: the modes whose patches are installed; "always" is one of them.
            patches: some of `patches`; by default all.

        Raises:
            UnsupportedError: if a function is missing or lacks a parameter; none is replaced.
        """
        self.session.with_snip = self.session.with_snip or "--snip" in asked
        patches = self.patches if patches is None else patches
        wanted = [p for p in patches if p.when in asked and p.target not in self._installed]
        wanted = [p for p in wanted if not (p.optional and p.problem())]
        found = [(p, *p.find()) for p in wanted]
        for package in dict.fromkeys(p.package for p in wanted):
            if not package.is_tested(package.version):
                warn_once_per_job(
                    logger,
                    f"{package.release} was not tested with SNIP (tested: {package.tested}); all "
                    "functions that SNIP needs were found, so the run continues",
                )
        for p, owner, function in found:
            if p.handler is not None:
                name = p.attribute.rpartition(".")[2]
                wrapper = p.wrapper(function, self.session)
                self._installed[p.target] = replace_attribute(owner, name, wrapper)

    def on_uninstall(self, action: Callable[[], None]) -> None:
        """Call `action` at `uninstall`."""
        self._uninstall_actions.append(action)

    def uninstall(self) -> None:
        """End the session and restore the objects that `install` replaced.

        Where another tool has wrapped a patched function since, its wrapper stays. The patched
        function inside of it then only calls the original.
        """
        self.session.end()
        self.session.is_over = True
        while self._uninstall_actions:
            action = self._uninstall_actions.pop()
            action()
        for undo in reversed(self._installed.values()):
            undo()
        self._installed.clear()
        self.session = Session()
