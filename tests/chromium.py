"""A headless Chromium for tests of pages, spoken to by the DevTools protocol through a pipe: nothing to install but it.

with Browser() as browser:
    page = browser.open(path, width=390)
    page.wait_for("document.documentElement.dataset.drawn === '3'")
    assert page.problems == []
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers import PATIENCE_SECONDS

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Browser:
    """The browser, as a context; its pages see no profile, and ask the network for nothing by themselves."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [PROGRAM, *FLAGS, f"--user-data-dir={self._profile.name}"]
        # It reads its commands from descriptor 3, and answers on 4.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._target: str | None = None
        self._unread = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *raised: object) -> None:
        with suppress(OSError):
            self.send("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer.get("result", {})
                return result
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._read, 2**20) if ready else b""
            assert chunk, "Chromium does not answer"
            self._unread += chunk
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, path: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> Page:
        """Opens a file in a new page, in place of the one before; `scheme` is light or dark."""
        if self._target is not None:
            self.send("Target.closeTarget", targetId=self._target)
        self._target = target = self.send("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.prefer(scheme)
        page.send("Page.navigate", url=path.absolute().as_uri())
        return page


class Page:
    """A page of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command to the page and returns its result."""
        return self._browser.send(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        """Gives the window another size in CSS pixels; a narrow one is a phone's, with a touch screen."""
        is_phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    def prefer(self, scheme: str) -> None:
        """Chooses the colours that the reader likes, light or dark."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, expression: str) -> Any:
        """Returns the value of an expression of JavaScript; of a promise, what it comes to."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{condition} never came true"
            time.sleep(0.05)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Writes a PNG of the window, or of the whole page."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _of(self, *methods: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] in methods
        ]

    @property
    def problems(self) -> list[str]:
        """What the console holds of errors and warnings, and exceptions that nothing caught."""
        found = [entry["entry"] for entry in self._of("Log.entryAdded")]
        said = [call for call in self._of("Runtime.consoleAPICalled") if call["type"] in ("error", "warning", "assert")]
        thrown = self._of("Runtime.exceptionThrown")
        return [str(each) for each in (*found, *said, *thrown)]

    @property
    def requests(self) -> list[str]:
        """The addresses that the page has asked for, but for data that stands in it."""
        urls = [event["request"]["url"] for event in self._of("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]
