"""The documentation's site in a browser: served, it asks nobody else, and pages fit a phone."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium, colors

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site, built and served on the loopback interface."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=240)
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["index", "flags", "troubleshooting", "api"])
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
