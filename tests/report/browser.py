"""A headless Chromium through chromedriver, by the W3C WebDriver protocol over the standard library alone."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)
STARTED = re.compile(r"started successfully on port (\d+)")


def missing() -> str | None:
    """Why there is no browser to test in; None when there is one."""
    if not any(shutil.which(name) for name in BROWSERS):
        return "no Chromium is installed"
    return None if shutil.which("chromedriver") else "chromedriver is not installed"


class Browser:
    """One browser window. Use it as a context manager."""

    def __enter__(self) -> Browser:
        # It chooses the port: one that was free a moment ago may be another process's by now.
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self._url = f"http://127.0.0.1:{self._port()}"
            self._wait_for_driver()
            options = {
                "args": list(ARGUMENTS),
                "binary": next(path for name in BROWSERS if (path := shutil.which(name))),
            }
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            created = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._driver.kill()
            raise
        self._url += f"/session/{created['sessionId']}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=20)
            assert self._driver.stdout is not None
            self._driver.stdout.close()

    def open(self, path: Path) -> None:
        """Load a file."""
        self._call("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns; ``arguments`` are its ``arguments``."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float = 20.0) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"return Boolean({script});"):
            assert time.monotonic() < deadline, f"still false after {seconds} s: {script}"
            time.sleep(0.05)

    def look(self, *, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Set the window's size, theme and kind of pointer."""
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self._devtools("Emulation.setEmulatedMedia", features=[scheme, motion])

    def console(self) -> list[str]:
        """Messages of level warning and above since the last call."""
        found = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] in ("WARNING", "SEVERE")]

    def screenshot(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """The window, or the whole page, as PNG; also written to ``path``."""
        shot = self._devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        image = base64.b64decode(shot["data"])
        if path is not None:
            path.write_bytes(image)
        return image

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _port(self) -> int:
        """Where the driver listens, once it says so."""
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if found := STARTED.search(line):
                return int(found[1])
        raise RuntimeError("chromedriver did not start")

    def _wait_for_driver(self) -> None:
        for _ in range(100):
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise RuntimeError("chromedriver did not start")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from error
