"""What MkDocs does for this site beyond its settings.

- A fence of `math` holds LaTeX, as on GitHub. It becomes MathML when the site is built, so pages
  need no script for their equations.
- A short code without spaces, such as a flag or a path, is not broken over two lines.
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
    """Return a fence of LaTeX as MathML; a function of pymdownx.superfences.

    GitHub needs `aligned` and an escaped underscore; latex2mathml knows neither.

    Raises:
        ValueError: if a part of the LaTeX was not understood and would be printed as it is.
    """
    known = source.replace("{aligned}", "{align*}").replace(r"\_", "_")
    mathml = convert(known, display="block")
    # Bars of a norm are as high as letters; a font for mathematics stretches them over the line.
    mathml = mathml.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')
    if left := re.search(r">[^<>]*(&(?!#x)|\\)[^<>]*<", mathml):
        raise ValueError(f"latex2mathml does not understand {left[0]} in: {source}")
    return f'<div class="equation">{mathml}</div>'


def on_page_content(html: str, **_: Any) -> str:
    """Return a page whose short codes have the class `word`, which style.css keeps on one line."""
    return re.sub(r"<code>([^<>\s]{1,40})</code>", r'<code class="word">\1</code>', html)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the fence `math`."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": equation}]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page whose links to the repository's pages lead to those of the site."""
    for name, page in ROOT_PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}")
    return markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages, with links as they are from docs/."""
    for name, page in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=re.sub(r"\]\(docs/", "](", text)))
    return files
