"""What docs/stability.md lists is there."""

import re

from megatron_snip.cli.schema import SCHEMAS, schema
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "stability.md").read_text()


def test_the_page_has_every_schema_and_its_version() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.*?) ?\|$", PAGE, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(SCHEMAS)
    for name, file, versions in rows:
        path, _, _ = SCHEMAS[name].path.partition(";")
        assert path.split(",")[0] in file
        properties = schema(name).get("properties", {})
        assert versions.partition(";")[0] == str(properties.get("version", {}).get("const", ""))
