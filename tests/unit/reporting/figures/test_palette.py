"""Every format has a color, and formats of different bits are told apart."""

from matplotlib.colors import to_rgb

from megatron_snip.formats import FORMATS
from megatron_snip.reporting.figures.canvas import DARK, LIGHT
from megatron_snip.reporting.figures.palette import NAMES, format_color, format_legend, format_map


def test_every_format_has_a_color_in_both_themes() -> None:
    for theme in (LIGHT, DARK):
        colors = {name: to_rgb(format_color(name, theme)) for name in FORMATS}
        assert len(set(colors.values())) == len(FORMATS)
        assert len(NAMES) == format_map(theme).N


def test_fp8_and_fp4_differ_in_lightness_too() -> None:
    def lightness(name: str) -> float:
        red, green, blue = to_rgb(format_color(name, LIGHT))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert abs(lightness("fp8") - lightness("fp4")) > 0.1


def test_legends_name_the_highest_precision_first() -> None:
    patches = format_legend(["fp4", "bf16", "fp8", "fp4"], LIGHT)
    assert [patch.get_label() for patch in patches] == ["bf16", "fp8", "fp4"]
