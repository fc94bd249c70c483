"""What MkDocs does for this site beyond its settings.

- A fence of `math` holds LaTeX, as on GitHub. It becomes MathML when the site is built, so pages
  need no script for their equations.
- CONTRIBUTING, CHANGELOG and SECURITY lie at the root of the repository, where people and hosts
  look for them. Here they are pages as well.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}


def equation(source: str, *_: Any, **__: Any) -> str:
    """Return a fence of LaTeX as MathML; a function of pymdownx.superfences."""
    return f'<div class="equation">{convert(source, display="block")}</div>'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the fence `math`."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": equation}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages, with links as they are from docs/."""
    for name, page in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=re.sub(r"\]\(docs/", "](", text)))
    return files
