"""Published performance recipes of Megatron-Bridge, and what SNIP does with their flags.

`recipes.jsonl` has the settings that matter here of 188 recipes of Megatron-Bridge (commit
067f987df0 of 2026-08-22), under the names of Megatron's arguments; recipes with the same settings
share a line. `python -m tests.recipes --write` writes the table of docs/megatron.md from it.
"""

import json
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_snip.patches.fast_flags import FAST_FLAGS
from megatron_snip.patches.flag_rows import FlagRow

_FILE = Path(__file__).with_name("recipes.jsonl")
_HEAD = """\
| Megatron's setting | Bridge recipes (of 188) | with `--snip` | with `--snip-collect-only` | |
| --- | --- | --- | --- | --- |"""
_EFFECTS = {
    "runs": "plans",
    "restricts": "plans, with fewer options for some linears",
    "measures": "measures only",
    "refuses": "refused",
}


def load() -> Iterator[tuple[str, Namespace]]:
    """Yield (name, Megatron's namespace) of every recipe."""
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name in row["recipes"]:
            yield name, namespace(row["settings"])


def namespace(settings: dict[str, Any]) -> Namespace:
    """Return settings as Megatron holds them after its own validation."""
    dtypes = {k: getattr(torch, v) for k, v in settings.items() if k.endswith("_dtype")}
    return Namespace(transformer_impl="transformer_engine", bf16=True, **{**settings, **dtypes})


def count(row: FlagRow) -> int:
    """Return how many recipes have the setting of a row."""
    return sum(row.is_on(args) for _, args in load())


def table() -> str:
    """Return the table of docs/megatron.md: one line for each setting."""
    lines = [
        f"| {_code(row.flag)} | {row.num_recipes} | {_EFFECTS[row.plans]} "
        f"| {'refused' if row.plans == 'refuses' else 'measures'} | {row.text} |"
        for row in FAST_FLAGS
    ]
    return "\n".join([_HEAD, *lines]) + "\n"


def _code(text: str) -> str:
    """Return the name of a setting with its flags, and their values, as code."""
    return re.sub(r"--[\w-]+(?: (?!alone|in|or|with)\w+)?", r"`\g<0>`", text)
