"""megatron-snip: adaptive per-linear precision (SNIP, arXiv:2602.01410) for Megatron-LM.

Importing this package is cheap and changes nothing. Each subpackage imports torch, Megatron or
OR-Tools where it needs them, and Megatron is patched only on request.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from megatron_snip.version import __version__

__all__ = ["__version__"]

_HERE = Path(__file__).resolve().parent


class _FoldersBeside:
    """Finds `megatron_snip.kernels` and `.patches` in a checkout, beside this folder.

    Builds put them into this package. The folder above is not on `__path__`: it has more than these
    two, a second `megatron_snip` among it.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, folder = name.rpartition(".")
        if parent != __name__ or folder not in ("kernels", "patches"):
            return None
        package = _HERE.parent / folder
        return spec_from_file_location(
            name, package / "__init__.py", submodule_search_locations=[str(package)]
        )


if not (_HERE / "patches").is_dir():
    # First: an editable install of another checkout has a finder for its own folders.
    sys.meta_path.insert(0, _FoldersBeside())
