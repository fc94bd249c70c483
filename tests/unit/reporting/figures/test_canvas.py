"""Pictures come out alike every time, in the size asked for, and whole with odd names."""

import io

import pytest
from PIL import Image

from megatron_snip.reporting.figures.canvas import DARK, NARROW, WIDE, Canvas, mesh_style, png, svg


def drawn(canvas: Canvas, label: str = "loss") -> tuple[bytes, bytes]:
    with canvas.style():
        figure = canvas.figure(2.0)
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], label=label)
        axes.legend()
        return svg(figure), png(figure, canvas)


def test_the_same_picture_is_the_same_file() -> None:
    assert drawn(WIDE) == drawn(WIDE)


@pytest.mark.parametrize("canvas", [WIDE, NARROW, Canvas(512, DARK)])
def test_pictures_have_the_canvas_s_width_and_ground(canvas: Canvas) -> None:
    vector, raster = drawn(canvas)
    points = canvas.width_px * 72 / 96
    assert f'width="{points:g}pt"'.encode() in vector
    with Image.open(io.BytesIO(raster)) as image:
        assert image.width == 2 * canvas.width_px
        corner = image.convert("RGB").getpixel((0, 0))
    assert "#{:02x}{:02x}{:02x}".format(*corner) == canvas.theme.surface


def test_names_are_no_formulas_and_no_markup() -> None:
    vector, _ = drawn(WIDE, label=r"$\frac{a$ <script>&")
    assert b"<script>" not in vector


def test_styles_do_not_leak() -> None:
    import matplotlib

    before = matplotlib.rcParams["font.size"]
    drawn(NARROW)
    assert matplotlib.rcParams["font.size"] == before


def test_many_cells_are_stored_as_pixels() -> None:
    assert mesh_style(WIDE, 126, 5000, gap=True)["rasterized"]
    assert "rasterized" not in mesh_style(WIDE, 4, 16, gap=True)
