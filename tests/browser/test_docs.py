"""The documentation's site in a browser: pages fit a phone, ask no other server, have a search."""

import functools
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.browser.chromium import TIMEOUT_S, Chromium, colors

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1200)
    return site


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site, served on the loopback interface."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["index", "flags", "how-it-works", "troubleshooting", "api"])
def test_a_page_fits_a_phone_and_asks_nobody_else(
    browser: Chromium, address: str, name: str, dark: bool
) -> None:
    browser.open(f"{address}/{name}.html", 375, 800, dark)
    assert browser.evaluate("document.documentElement.scrollWidth") == 375
    assert browser.complaints() == []
    asked = [url for url in browser.requests() if not url.startswith("data:")]
    assert asked and all(url.startswith(address) for url in asked)
    shot = browser.screenshot((0, 0, 375, 800))
    assert colors(shot) >= 4
    corner = shot.getpixel((2, 700))
    assert isinstance(corner, tuple) and (sum(corner) < 300) == dark


@pytest.mark.parametrize(
    "name", ["index", "tutorial", "how-it-works", "comparison", "architecture"]
)
def test_pictures_are_drawn_and_equations_are_typeset(
    browser: Chromium, address: str, name: str
) -> None:
    browser.open(f"{address}/{name}.html", 1280, 900, dark=False)
    broken = "[...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
    assert browser.evaluate(broken) == []
    equations = browser.evaluate("document.querySelectorAll('.equation math').length")
    assert (equations >= 4) == (name == "how-it-works")
    texts = browser.evaluate("[...document.querySelectorAll('.equation')].map(e => e.innerText)")
    assert not [text for text in texts if "&" in text or "\\" in text]


def test_the_lines_of_an_equation_are_aligned_at_their_equals_signs(
    browser: Chromium, address: str
) -> None:
    browser.open(f"{address}/how-it-works.html", 1280, 900, dark=False)
    edges = browser.evaluate(
        """[...document.querySelector(".equation").querySelectorAll("mtr")].map(row => {
          const sign = [...row.querySelectorAll("mo")].find(e => e.textContent === "=");
          const {left, top} = sign.getBoundingClientRect();
          return [Math.round(left), Math.round(top)];
        })"""
    )
    assert len(edges) == 3
    assert len({left for left, _ in edges}) == 1
    assert len({top for _, top in edges}) == 3


def test_bars_of_norms_are_as_high_as_letters(browser: Chromium, address: str) -> None:
    browser.open(f"{address}/how-it-works.html", 1280, 900, dark=False)
    heights = browser.evaluate(
        """[...document.querySelectorAll(".equation mo")].filter(e => e.textContent === "\u2016")
          .map(e => Math.round(e.getBoundingClientRect().height))"""
    )
    assert len(heights) == 44 and len(set(heights)) == 1


@pytest.mark.parametrize("name", ["megatron", "flags", "architecture"])
def test_flags_and_paths_stay_on_one_line(browser: Chromium, address: str, name: str) -> None:
    browser.open(f"{address}/{name}.html", 375, 800, dark=False)
    lines = browser.evaluate(
        """[...document.querySelectorAll(".md-typeset :not(pre) > code")]
          .filter(e => !/\\s/.test(e.textContent) && e.textContent.length < 30)
          .map(e => [e.textContent, e.getClientRects().length])"""
    )
    assert len(lines) > 10
    assert [text for text, rows in lines if rows != 1] == []


def test_a_picture_on_a_phone_is_wide_enough_to_read(browser: Chromium, address: str) -> None:
    browser.open(f"{address}/index.html", 375, 800, dark=False)
    assert browser.evaluate("document.querySelector('.md-typeset img').clientWidth") >= 500
    assert browser.evaluate("document.documentElement.scrollWidth") == 375


@pytest.mark.parametrize("place", ["served", "from disk"])
def test_the_search_finds_a_flag(browser: Chromium, site: Path, address: str, place: str) -> None:
    browser.open(
        f"{address}/index.html" if place == "served" else site / "index.html", 1280, 900, False
    )
    browser.evaluate(
        """(() => {
          const input = document.querySelector("[data-md-component='search-query']");
          input.focus();
          input.value = "snip-heal-from";
          input.dispatchEvent(new Event("input", {bubbles: true}));
          input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
        })()"""
    )
    found = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    end = time.monotonic() + TIMEOUT_S
    while not (links := browser.evaluate(found)) and time.monotonic() < end:
        time.sleep(0.1)
    assert any("flags.html" in link or "choosing.html" in link for link in links), links
