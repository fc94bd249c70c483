"""Headless Chromium over its debugging pipe: NUL-ended JSON on descriptors 3 and 4.

The pipe needs no port, no driver and no package.
"""

import base64
import io
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
TIMEOUT_S = 120.0


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    def __init__(self, program: str, home: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._id = 0
        self._rest = b""
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        # A shell puts the descriptors where the browser looks for them; exec keeps the process.
        script = f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *FLAGS, f"--user-data-dir={home / 'profile'}"],
            pass_fds=(read_end, write_end),
            env={**os.environ, "HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come meanwhile are kept."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._id:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path | str, width: int, height: int, dark: bool) -> None:
        """Load a file or an address as on a screen of this size (CSS pixels)."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self._until("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, box: tuple[float, float, float, float] | None = None) -> Image.Image:
        """Return the whole page, or (x, y, width, height) of it."""
        if box is None:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            box = (0, 0, size["width"], size["height"])
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1)
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")

    def complaints(self) -> list[str]:
        """Return what the console would show since the page was opened."""
        wanted = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e["method"] in wanted]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the page was opened."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait(30)
            os.close(self._write)
            os.close(self._read)

    def _until(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            self._receive()

    def _receive(self) -> dict[str, Any]:
        """Return the next message; keep it if it is an event."""
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            added = os.read(self._read, 1 << 20)
            assert added, "the browser has ended"
            self._rest += added
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


def colors(image: Image.Image) -> int:
    """Return how many colors cover more than a thousandth of an image; 1 is a blank one."""
    pixels = np.asarray(image).reshape(-1, 3) // 16
    _, counts = np.unique(pixels, axis=0, return_counts=True)
    return int((counts > len(pixels) / 1000).sum())
