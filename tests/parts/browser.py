"""A headless Chromium, spoken to over its DevTools pipe: no port, no driver, no Python package."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "there is no chromium: apt-get install -y chromium (Debian) lets the browser tests of the report run"

_AT_3_AND_4 = "import os, sys; [os.dup2(int(end), place) for place, end in zip((3, 4), sys.argv[1:])]; os.execv(sys.argv[3], sys.argv[3:])"
"""Where Chromium reads and writes."""


class PageLeftError(Exception):
    """The page was left or read again before an expression had its value."""


class Browser:
    """One page of one browser. `errors` holds what the console and uncaught exceptions said."""

    def __init__(self, profile: Path) -> None:
        to_browser, from_us = os.pipe()
        to_us, from_browser = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AT_3_AND_4, *map(str, ends), CHROMIUM, "--headless=new", "--remote-debugging-pipe",
             "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-ipc-flooding-protection", "--hide-scrollbars", "--disable-dev-shm-usage",
             "--disable-background-networking", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._write, self._read = from_us, os.fdopen(to_us, "rb", buffering=0)
        self._rest, self._id, self._session = b"", 0, None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path | str, *, width: int = 1400, height: int = 1000, dark: bool = False) -> float:
        """Opens a file at this size; the errors of earlier pages are forgotten. Returns seconds until it was drawn."""
        self.resize(width, height)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=theme)
        self.call("Page.navigate", url="about:blank")  # else another hash of the same file would load nothing
        self.errors.clear()
        self.requests.clear()
        started = time.perf_counter()
        self.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && document.querySelector('main[data-view]') !== null")
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")
        return time.perf_counter() - started

    def resize(self, width: int, height: int) -> None:
        """The page's size in CSS pixels."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def run(self, script: str) -> Any:
        """The value of an expression in the page. Raises AssertionError with what it threw."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def rest(self) -> None:
        """Leaves the page: it then draws and reloads nothing, and takes no CPU from other tests."""
        self.call("Page.navigate", url="about:blank")

    def wait(self, condition: str, seconds: float = 30.0) -> Any:
        """Until the expression is true; returns its value. The page may be read again meanwhile, even in the middle of it."""
        deadline = time.monotonic() + seconds
        while not (value := self._value(condition)):
            assert time.monotonic() < deadline, f"{condition} did not become true; errors: {self.errors}"
            time.sleep(0.02)
        return value

    def _value(self, condition: str) -> Any:
        try:
            return self.run(condition)
        except PageLeftError:
            return None

    def press(self, key: str) -> None:
        """One key, down and up."""
        code = {"windowsVirtualKeyCode": 9} if key == "Tab" else {}  # without it the focus does not move
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text, **code)

    def close(self) -> None:
        """Ends the browser."""
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(10)
        finally:
            self._process.kill()
            os.close(self._write)
            self._read.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command and its answer; events that come before it are noted."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._id:
                error = answer.get("error", {}).get("message")
                if error == "Inspected target navigated or closed":
                    raise PageLeftError(error)
                assert error is None, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = self._read.read(1 << 16)
            assert block, "the browser has ended"
            self._rest += block
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {params['message']}")
            self.call("Page.handleJavaScriptDialog", accept=True)
