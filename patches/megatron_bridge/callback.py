"""SnipCallback: SNIP in a script of Megatron-Bridge, without flags.

from megatron_snip.bridge import SnipCallback, SnipConfig

snip = SnipCallback(SnipConfig(efficiency_target=0.75))
pretrain(cfg, forward_step, callbacks=[snip])
"""

from collections.abc import Iterator
from typing import Any

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UsageError
from megatron_snip.patches.arguments import exit_on_error

_USE = "SnipCallback(SnipConfig(efficiency_target=0.75))"


class SnipCallback:
    """Gives SNIP's settings to the `pretrain` that gets it among its callbacks.

    Attributes:
        config: the settings; they turn SNIP on unless they say `enabled=False`.
    """

    def __init__(self, config: SnipConfig | None = None) -> None:
        """Install SNIP's patches on Megatron-Bridge; `pretrain` is to be called later.

        Raises:
            SystemExit: with status 2, after one line, without settings, or if Megatron-Bridge lacks
                a function that SNIP needs.
        """
        from megatron_snip.patches.install import install_for_callback  # it imports this module

        self.config = exit_on_error(lambda: _checked(config))
        self._session = install_for_callback()
        self._session.has_callback = True

    def on_train_start(self, context: Any) -> None:
        """Check that `pretrain` has attached a controller."""
        exit_on_error(self._check_attached)

    def _check_attached(self) -> None:
        if self.config.enabled and self._session.controller is None:
            raise UsageError(
                "SnipCallback trains nothing here: the model was not built by pretrain of "
                "megatron.bridge.training.pretrain; give the callback to that function"
            )


def callbacks_in(callbacks: Any) -> list[SnipCallback]:
    """Return the SnipCallbacks among what `pretrain` got: a list, a CallbackManager or None."""
    found = dict.fromkeys(x for x in _members(callbacks) if isinstance(x, SnipCallback))
    return list(found)


def _members(callbacks: Any) -> Iterator[Any]:
    """Yield the callbacks; a CallbackManager lists only their methods, which know their objects."""
    if hasattr(callbacks, "list_callbacks"):
        for method in callbacks.list_callbacks("on_train_start"):
            yield getattr(method, "__self__", None)
    else:
        yield from callbacks or ()


def _checked(config: Any) -> SnipConfig:
    if not isinstance(config, SnipConfig):
        got = "nothing" if config is None else type(config).__name__
        raise UsageError(f"SnipCallback needs settings, and got {got}; write {_USE}")
    if "enabled" in config.model_fields_set:
        return config
    return config.model_copy(update={"enabled": True})
