"""A script that starts itself anew in its process (`os.execv`) is started with SNIP again.

Recipe runners of Megatron-Bridge do so, to have environment variables set before Python starts.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from megatron_snip.patches.registry import replace_attribute


def keep_in_new_program(start: Sequence[str], flags: Sequence[str]) -> Callable[[], None]:
    """From now on add words to the command line of a script that starts itself anew.

    Args:
        start: words before the script's name, e.g. `-m megatron_snip`.
        flags: words after the script's own.

    Returns:
        A function that ends it.
    """
    script = Path(sys.argv[0]).resolve()

    def with_snip(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def execute(path: Any, args: Sequence[Any], *environment: Any) -> Any:
            words = [os.fsdecode(word) for word in args]
            # Where the script's name stands; 0 is Python's, and means that it does not.
            place = next((i for i, x in enumerate(words) if i and Path(x).resolve() == script), 0)
            has_snip = set(start) & set(words[:place])
            if place and not has_snip:
                words = [*words[:place], *start, *words[place:], *flags]
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
