"""Prints the table of docs/megatron.md, or writes it there."""

import argparse
import re
from pathlib import Path

from tests.recipes import table

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"
BLOCK = re.compile(r"(?<=<!-- fast flags -->\n).*?(?=<!-- end of fast flags -->)", re.DOTALL)


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write it into docs/megatron.md")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: table(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
