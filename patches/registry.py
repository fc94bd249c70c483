"""Registry: installs the seams of a process, tells their state, and puts everything back.

    install({"always"})             the argument parser
    install({"always", "--snip"})   all that SNIP needs; all targets are checked before any changes
    uninstall()                     the very objects are back, or nothing is touched and the error
                                    says why

Installing twice changes nothing. Only module attributes are replaced, by name, and Megatron looks
each of them up by that name at the call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_snip.errors import UnsupportedError
from megatron_snip.patches.seam import Function, Seam, When
from megatron_snip.patches.session import Session
from megatron_snip.patches.target import check_version


@dataclass(frozen=True)
class Applied:
    """A seam in force: what was found, and what is there now."""

    seam: Seam
    owner: Any
    original: Function
    wrapper: Function

    @property
    def in_force(self) -> bool:
        """Whether the attribute is still the wrapper."""
        return getattr(self.owner, self.seam.target.name, None) is self.wrapper

    @property
    def wrapped_over(self) -> bool:
        """Whether somebody has wrapped the wrapper since (and calls it)."""
        current: Any = getattr(self.owner, self.seam.target.name, None)
        while current is not None and current is not self.wrapper:
            current = getattr(current, "__wrapped__", None)
        return current is self.wrapper and not self.in_force


@dataclass(frozen=True)
class State:
    """A seam's state.

    Attributes:
        word: `ready` to be installed, `installed`, `overwritten` by others since, `unusable`, or
            `not needed` in this release.
        detail: why, where the word leaves it open.
    """

    word: Literal["ready", "installed", "overwritten", "unusable", "not needed"]
    detail: str = ""


class Registry:
    """The seams of one process.

    Attributes:
        seams: what may be installed, in order.
        session: what the wrappers share.
    """

    def __init__(self, seams: Sequence[Seam], session: Session | None = None) -> None:
        self.seams = tuple(seams)
        self.session = Session() if session is None else session
        self._applied: dict[str, Applied] = {}

    def install(self, asked: Collection[When], strict_version: bool = False) -> None:
        """Wrap what is not wrapped yet; a second call changes nothing.

        Args:
            asked: what seams are wanted for.
            strict_version: refuse releases of megatron-core that were not tested.

        Raises:
            UnsupportedError: if a target is missing or lacks a parameter, or the release is
                refused; then nothing has been changed.
        """
        wanted = [s for s in self.seams if s.when in asked and s.name not in self._applied]
        wanted = [s for s in wanted if not (s.optional and s.target.problem())]
        if not wanted:
            return
        check_version(strict_version)
        found = [(seam, seam.target.owner(), seam.target.find()) for seam in wanted]
        for seam, owner, original in found:
            wrapper = seam.wrap(original, self.session)
            setattr(owner, seam.target.name, wrapper)
            self._applied[seam.name] = Applied(seam, owner, original, wrapper)

    def uninstall(self) -> None:
        """End the session and put back the very objects that `install` replaced.

        Raises:
            UnsupportedError: if somebody has replaced a wrapper since; then nothing is changed.
        """
        foreign = [a for a in self._applied.values() if not a.in_force]
        if foreign:
            names = ", ".join(str(a.seam.target) for a in foreign)
            raise UnsupportedError(
                f"cannot undo SNIP's patches: {names} was patched again since; undo that first"
            )
        self.session.end()
        for applied in reversed(self._applied.values()):
            setattr(applied.owner, applied.seam.target.name, applied.original)
        self._applied.clear()

    def state(self, seam: Seam) -> State:
        """Return a seam's state, for `megatron-snip doctor --patches`."""
        applied = self._applied.get(seam.name)
        if applied is not None:
            if applied.in_force:
                return State("installed")
            if applied.wrapped_over:
                return State("installed", "others have wrapped it again")
            return State("overwritten", f"others have replaced {seam.target}")
        problem = seam.target.problem()
        if problem is None:
            return State("ready")
        return State("not needed") if seam.optional else State("unusable", problem)
