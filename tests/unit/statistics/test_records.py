"""Records print, compare, and go to JSON and back."""

import dataclasses
import json

from megatron_snip.statistics.records import (
    BASE_COLUMNS,
    COUPLINGS,
    DERIVED,
    FORMAT_COLUMNS,
    SCALES,
    SCHEMA_VERSION,
    FormatStatistics,
    LinearStatistics,
    StatisticsTable,
)


def made() -> StatisticsTable:
    numbers = iter(range(1, 100))
    formats = {
        name: FormatStatistics(**{c: next(numbers) / 7 for c in FORMAT_COLUMNS})
        for name in ("fp8", "fp4")
    }
    base = {c: next(numbers) / 7 for c in BASE_COLUMNS}
    linear = LinearStatistics(
        "decoder.layers.0.mlp.linear_fc2", 1, 128, 256, 6.0, **base, formats=formats
    )
    return StatisticsTable(20, 2.5, 0.125, (linear,))


def test_a_table_survives_json_exactly() -> None:
    table = made()
    data = json.loads(json.dumps(table.to_json(), allow_nan=False))
    assert data.pop("version") == SCHEMA_VERSION == 1
    linears = tuple(
        LinearStatistics(
            **{**row, "formats": {n: FormatStatistics(**f) for n, f in row["formats"].items()}}
        )
        for row in data.pop("linears")
    )
    assert StatisticsTable(**data, linears=linears) == table


def test_the_schema_is_what_readers_rely_on() -> None:
    data = made().to_json()
    assert set(data) == {"version", "step", "loss", "probe_step", "linears"}
    (row,) = data["linears"]
    assert set(row) == {
        *("name", "stage", "in_features", "out_features", "flops_per_token", "formats"),
        *BASE_COLUMNS,
        *SCALES,
    }
    assert set(row["formats"]["fp4"]) == {*FORMAT_COLUMNS, *COUPLINGS, *DERIVED}


def test_every_number_of_a_row_is_a_column() -> None:
    """A field that is in no column would stay 0 after the reduction."""
    fields = {f.name for f in dataclasses.fields(LinearStatistics)}
    known = {"name", "stage", "in_features", "out_features", "flops_per_token", "formats"}
    assert fields - known == {*BASE_COLUMNS, *SCALES}
    fields = {f.name for f in dataclasses.fields(FormatStatistics)}
    assert fields - set(DERIVED) == {*FORMAT_COLUMNS, *COUPLINGS}
