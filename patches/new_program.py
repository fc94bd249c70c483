"""A script that starts itself or another script in its process (`os.execv`) starts it with SNIP.

Recipe runners of Megatron-Bridge do so, to have environment variables set before Python starts.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from megatron_snip.patches.registry import replace_attribute

START = ("-m", "megatron_snip")
"""Words before a script's name that start it with SNIP."""


LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
"""Modules that run the script which follows them."""


def keep_in_new_program(start: Sequence[str], flags: Sequence[str]) -> Callable[[], None]:
    """From now on add words to the command line of a Python script that this process becomes.

    Args:
        start: words before this script's name, e.g. `START`; none if it imports SNIP itself.
        flags: words after the script's own.

    Returns:
        A function that ends it.
    """
    this_script = Path(sys.argv[0]).resolve()

    def with_snip(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def execute(path: Any, args: Sequence[Any], *environment: Any) -> Any:
            words = [os.fsdecode(word) for word in args]
            place = _place_of_script(words)
            if place and START[1] not in words[:place]:
                is_this = Path(words[place]).resolve() == this_script
                before = start if is_this else start or START
                words = [*words[:place], *before, *words[place:], *flags]
            return original(path, words, *environment)

        return execute

    # All other functions of os that replace the process call one of these two.
    undo = [
        replace_attribute(os, "execv", with_snip(os.execv)),
        replace_attribute(os, "execve", with_snip(os.execve)),
    ]

    def end() -> None:
        for each in undo:
            each()

    return end


def _place_of_script(words: Sequence[str]) -> int:
    """Return where a command line names the script that Python runs; 0 if it does not."""
    programs = (Path(word).name for word in words if not word.startswith("-") and "=" not in word)
    program = next((name for name in programs if name != "env"), "")
    if re.fullmatch(r"python[\d.]*", program) is None:
        return 0
    for place, word in enumerate(words):
        if word.endswith(".py") and Path(word).is_file():
            return place
        runs_other_module = place > 0 and words[place - 1] == "-m" and word not in LAUNCHERS
        if word == "-c" or runs_other_module:
            return 0  # what ends in .py after it is an argument
    return 0
