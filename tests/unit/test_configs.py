"""Every file in configs/ loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_snip.config import SnipConfig, make_config, read_yaml
from megatron_snip.trainer.config import load_train_config

FOLDER = Path(__file__).parents[2] / "configs"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())


def test_there_are_some() -> None:
    assert any(path.name == "demo.yaml" for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_it_loads(path: Path) -> None:
    assert path.suffix == ".yaml", "configs/ holds YAML"
    values = read_yaml(path)
    assert values
    if set(values) <= set(SnipConfig.model_fields):
        make_config(values)  # SNIP's settings alone
    else:
        load_train_config(path, {}, {})
