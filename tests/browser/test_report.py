"""The report as people see it: in a browser, on a desk and on a phone."""

from pathlib import Path

import pytest

from megatron_snip.reporting.events import Notice
from megatron_snip.reporting.report import make_report
from megatron_snip.reporting.run_record import read_run
from tests.browser.chromium import Chromium, colors
from tests.unit.reporting.runs import Shape, config, write_run

pytestmark = pytest.mark.filterwarnings("error:constrained_layout")  # labels left no room

SCREENS = {"desk": (1280, 900), "tablet": (800, 1100), "phone": (390, 740)}
BOXES = """[...document.querySelectorAll('figure img')].map(image => {
  const box = image.getBoundingClientRect();
  return [box.x + scrollX, box.y + scrollY, box.width, box.height];
})"""
HOSTILE = (
    "<img src='http://127.0.0.1:9/x' onerror=document.title=1><script>document.title=2</script>"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with long and hostile words in its files."""
    folder = tmp_path_factory.mktemp("runs")
    notice = Notice("reverted", HOSTILE + "x" * 300)
    shape = Shape(config(granularity="gemm"), note=HOSTILE, notices=((9, notice),))
    run = write_run(folder / ("a-name-as-long-as-users-make-them-" * 4), shape)
    path = folder / "report.html"
    path.write_text(make_report(read_run(run)))
    return path


@pytest.mark.parametrize("screen", SCREENS)
def test_every_figure_is_drawn_and_wide_enough_to_read(
    browser: Chromium, page: Path, screen: str
) -> None:
    """On a phone a figure scrolls within its card."""
    width, height = SCREENS[screen]
    browser.open(page, width, height, dark=False)
    shot = browser.screenshot()
    assert browser.evaluate("document.documentElement.scrollWidth") == width == shot.width
    boxes = browser.evaluate(BOXES)
    assert len(boxes) == 7
    for x, y, box_width, box_height in boxes:
        assert x >= 0 and box_width >= 600 and box_height > 40
        assert x + box_width <= width or screen == "phone"
        right = min(round(x + box_width), width)
        drawn = shot.crop((round(x), round(y), right, round(y + box_height)))
        assert colors(drawn) >= 4  # ground, text, lines, something shown
    assert browser.complaints() == []
    hints = "[...document.querySelectorAll('.hint')].filter(h => h.offsetHeight > 0).length"
    assert browser.evaluate(hints) == (7 if screen == "phone" else 0)


def test_the_page_loads_nothing_from_the_network_and_runs_no_script(
    browser: Chromium, page: Path
) -> None:
    browser.open(page, *SCREENS["desk"], dark=False)
    asked = [url for url in browser.requests() if not url.startswith("data:")]
    assert asked == [page.as_uri()]
    assert HOSTILE in browser.evaluate("document.body.textContent")
    assert "a-name-as-long" in browser.evaluate("document.title")


def test_wide_tables_scroll_within_their_card(browser: Chromium, page: Path) -> None:
    width, height = SCREENS["phone"]
    browser.open(page, width, height, dark=False)
    before = browser.screenshot().height
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.screenshot().height > before
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    wide = "[...document.querySelectorAll('.scroll')].some(s => s.scrollWidth > s.clientWidth)"
    assert browser.evaluate(wide)


def test_tables_of_health_fit_a_desk_and_alerts_are_not_cut_off(
    browser: Chromium, page: Path
) -> None:
    browser.open(page, *SCREENS["desk"], dark=False)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    tables = """[...document.querySelectorAll('.scroll')].map(s =>
      [s.getAttribute('aria-label'), s.scrollWidth <= s.clientWidth])"""
    health = {name: fits for name, fits in browser.evaluate(tables) if name.startswith("Worst ")}
    assert len(health) == 8 and all(health.values())
    cut = "[...document.querySelectorAll('td')].filter(c => c.scrollWidth > c.clientWidth).length"
    assert browser.evaluate(cut) == 0


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast(browser: Chromium, page: Path, dark: bool) -> None:
    """WCAG 2.1, 1.4.3: a contrast of at least 4.5."""
    colors_of = """['.caption', 'h1', 'td', 'th', 'summary'].map(selector => {
      const element = document.querySelector(selector);
      let ground = element;
      while (getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)')
        ground = ground.parentElement;
      return [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor];
    })"""
    browser.open(page, *SCREENS["desk"], dark=dark)
    for text, ground in browser.evaluate(colors_of):
        assert contrast(rgb(text), rgb(ground)) >= 4.5, (text, ground)
    ground = rgb(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (max(ground) < 0.3) is dark


def rgb(text: str) -> tuple[float, ...]:
    return tuple(float(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")[:3])


def contrast(one: tuple[float, ...], two: tuple[float, ...]) -> float:
    def luminance(color: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)
