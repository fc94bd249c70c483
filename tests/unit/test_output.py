"""What is written is read back as it was, by the strictest common reader of its format."""

import csv
import io
import subprocess
import sys

import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from megatron_snip.output import console, csv_text, yaml_text
from tests.hostile.texts import texts


@given(comment=texts, keys=st.dictionaries(texts, texts, max_size=4))
def test_yaml(comment: str, keys: dict[str, str]) -> None:
    written = {key: value for key, value in keys.items() if encodable(key + value)}
    text = yaml_text(written, ["a comment", comment])
    assert yaml.safe_load(text) == written
    assert text.startswith("# a comment\n# ")
    assert all(line.isprintable() for line in text.split("\n"))


def encodable(text: str) -> bool:
    """Whether text can be written at all: lone surrogates have no encoding."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


@given(rows=st.lists(st.tuples(texts, texts, st.floats(allow_nan=False)), max_size=4))
def test_csv(rows: list[tuple[str, str, float]]) -> None:
    text = csv_text(rows)
    assert text.replace("\n", "").isprintable()
    back = list(csv.reader(io.StringIO(text), strict=True))
    assert len(back) == len(rows) == text.count("\n")
    for row, (*names, number) in zip(back, rows, strict=True):
        assert float(row[2]) == number
        for cell, name in zip(row[:2], names, strict=True):
            assert not cell.lstrip().startswith(("=", "+", "-", "@"))
            assert name in cell or not (name.isprintable() and "\\" not in name)


@given(name=texts)
def test_a_terminal_gets_text_alone(name: str) -> None:
    out = console()
    out.file = io.StringIO()
    table = Table(name, title=name)
    table.add_row(name)
    out.print(name)
    out.print(table)
    assert out.file.getvalue().replace("\n", "").isprintable()


PRINTING = """
import sys
from megatron_snip.output import outlive_output
outlive_output()
print("first", flush=True)
sys.stdin.read(1)
print("x" * 100_000, flush=True)
print("\u00e9", file=sys.stderr, flush=True)
sys.exit(7)
"""


def test_a_process_outlives_the_reader_of_its_output() -> None:
    """As in `... 2>&1 | head -1`; training has a test of its own (tests/distributed)."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stdin.close()
    assert process.wait(600) == 7
