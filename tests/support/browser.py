"""A page in a real browser: headless Chromium, driven through a pipe by its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--disable-dev-shm-usage",
]  # fmt: skip


class Browser:
    """One tab. ``errors`` collects exceptions and console errors, ``requests`` every address that was asked for."""

    def __init__(self, width=1100, height=900):
        self.errors, self.requests = [], []
        self._number, self._buffer, self._replies, self._events = 0, b"", {}, set()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        from_us, self._to_it = os.pipe()
        self._from_it, to_us = os.pipe()

        def connect():  # Chromium reads commands from descriptor 3 and writes answers to descriptor 4
            read, write = os.dup(from_us), os.dup(to_us)
            os.dup2(read, 3)
            os.dup2(write, 4)

        command = [CHROMIUM, *_QUIET, f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(3, 4), preexec_fn=connect, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(from_us)
        os.close(to_us)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with suppress(OSError, AssertionError, TimeoutError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        os.close(self._to_it)
        os.close(self._from_it)
        self._profile.cleanup()

    def resize(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, place):
        """A file, or an address."""
        self._events.discard("Page.loadEventFired")
        self.call("Page.navigate", url=place if isinstance(place, str) else place.resolve().as_uri())
        self._read_until(lambda: "Page.loadEventFired" in self._events)

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, expression, seconds=60):
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} never came true; errors: {self.errors}")
            time.sleep(0.05)

    def press(self, key, text=""):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text if kind == "keyDown" else "")

    def prefer(self, scheme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path):
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])
        )

    def pdf(self):
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    def call(self, method, **parameters):
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._to_it, json.dumps(message).encode() + b"\0")
        self._read_until(lambda: number in self._replies)
        reply = self._replies.pop(number)
        assert "error" not in reply, (method, reply["error"])
        return reply["result"]

    def _read_until(self, done, seconds=60):
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end or self._process.poll() is not None:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._from_it, 1 << 20)
            *messages, self._buffer = (self._buffer + chunk).split(b"\0")
            for message in map(json.loads, messages):
                self._take(message)

    def _take(self, message):
        if "id" in message:
            self._replies[message["id"]] = message
            return
        method, params = message["method"], message["params"]
        self._events.add(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
