"""docs/how-it-works.png is what docs/errors_figure.py draws, and shows something."""

from __future__ import annotations

import importlib.util
import io

import numpy as np
import pytest
from PIL import Image

from tests.unit.docs.commands import ROOT

pytest.importorskip("matplotlib")


def test_the_picture_is_fresh() -> None:
    path = ROOT / "docs" / "errors_figure.py"
    spec = importlib.util.spec_from_file_location("errors_figure", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stream = io.BytesIO()
    module.draw().savefig(stream, dpi=130)
    stored, drawn = (
        np.asarray(Image.open(source).convert("RGB"), dtype=float)
        for source in (ROOT / "docs" / "how-it-works.png", stream)
    )
    assert stored.shape == drawn.shape
    # Another release of matplotlib may smooth edges otherwise.
    assert np.abs(stored - drawn).mean() < 1.0, "run: python docs/errors_figure.py"
    assert 0.02 < (stored < 128).any(axis=2).mean() < 0.5
