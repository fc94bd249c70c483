"""`megatron-snip import`: files that people wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_snip.options import Option
from megatron_snip.planning.plan import read_plan
from tests.unit.cli.test_export import folder as folder
from tests.unit.cli.test_export import imported
from tests.unit.planning.build import name_of

WRITTEN_BY_HAND = """
configs:
  high:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {}
  low:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp4_quantization_recipe: nvfp4, override_nonquantized_autocast: true}
    evaluation_recipe: {}
matchers:
  first: {type: glob, pattern: "*layers.0.*", config: high, enabled: true}
  off: {type: glob, pattern: "*", config: high, enabled: false}
  rest: {type: glob, pattern: "*.mlp.*", config: low, enabled: true}
"""


def test_a_file_written_by_hand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hand.yaml").write_text(WRITTEN_BY_HAND)
    assert list(imported("hand.yaml").values()) == ["bf16", "nvfp4", "nvfp4", "nvfp4"]
    text = capsys.readouterr().out
    assert "nvfp4: 3 linears" in text and "precision: 0.9000" in text
    assert "warning: evaluation recipes are left out" in text


def test_the_base_is_what_the_run_does_by_default(folder: Path) -> None:
    Path("none.yaml").write_text("configs: {}\nmatchers: {}\n")
    assert set(imported("none.yaml").values()) == {"bf16"}
    assert set(imported("none.yaml", "--base", "mxfp8").values()) == {"mxfp8"}


def test_an_imported_plan_is_a_plan(folder: Path) -> None:
    """Its digest is checked when it is read, and its work adds up."""
    Path("hand.yaml").write_text(WRITTEN_BY_HAND)
    imported("hand.yaml")
    plan = read_plan(Path("back.json"))
    assert plan.linears[name_of(3)] == Option.uniform("nvfp4")
    assert plan.efficiency == pytest.approx(0.9) and plan.stages == (pytest.approx(0.9),)
