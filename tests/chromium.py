"""Controls a headless Chromium with its DevTools protocol, over a web socket."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Link:
    """A connection to the browser, or to one of its tabs."""

    def __init__(self, socket):
        self._socket, self._count, self.on_event = socket, 0, lambda kind, about: None

    def send(self, method, **params):
        """Sends a command and returns its result."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=120))
            if message.get("id") == self._count:
                assert "error" not in message, message["error"]
                return message["result"]
            self.on_event(message["method"], message["params"])


class Tab:
    """One tab: its requests, the messages of its console, and the actions of a user."""

    def __init__(self, link):
        self.send, link.on_event = link.send, self._note
        self.requests: list[str] = []
        self.problems: list[str] = []  # the console's errors and warnings, and exceptions
        self.loaded = 0
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def _note(self, kind, about):
        if kind == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif kind == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"]))
        elif kind == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(about["args"]))
        elif kind == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif kind == "Page.loadEventFired":
            self.loaded += 1

    def size(self, width, height=900, dark=False):
        """Sets the size of the window and whether the system is dark."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = "dark" if dark else "light"
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def open(self, url):
        """Opens an address and waits until the page is loaded and drawn."""
        before = self.loaded
        self.send("Page.navigate", url=url)
        until = time.monotonic() + 120
        while self.loaded == before:
            assert time.monotonic() < until, f"{url} does not load"
            self.send("Runtime.evaluate", expression="1")  # events arrive with answers
            time.sleep(0.02)
        self.settle()

    def settle(self):
        """Waits until the next two frames are drawn."""
        self.js(
            "new Promise((done) => "
            "requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def js(self, expression):
        """Returns the value of an expression in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression, seconds=120):
        """Waits until an expression is true."""
        until = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < until, f"never true: {expression}\n{self.problems}"
            time.sleep(0.05)

    def box(self, selector):
        """Scrolls to an element. Returns its left, top, width and height in the window."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.settle()
        rect = self.js(f"{element}.getBoundingClientRect().toJSON()")
        return rect["left"], rect["top"], rect["width"], rect["height"]

    def move(self, x, y):
        """Moves the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def click(self, selector):
        """Clicks the centre of an element."""
        left, top, width, height = self.box(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=left + width / 2,
                y=top + height / 2,
                button="left",
                clickCount=1,
            )
        self.settle()

    def press(self, key):
        """Presses a key. It goes to the focused element."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        codes = {"Enter": 13, " ": 32}
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=codes.get(key, 0),
                **extra,
            )
        self.settle()

    def screenshot(self, path, whole=True):
        """Writes a PNG of the page."""
        Path(path).write_bytes(
            base64.b64decode(
                self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
            )
        )


@contextmanager
def browser():
    """Starts a browser that ends with the block. Yields a function that opens a new tab."""
    if PATH is None:
        pytest.skip("chromium is not installed: run `make browser`")
    from websockets.sync.client import connect

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = [
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
        ]
        if os.geteuid() == 0:
            options.append("--no-sandbox")
        process = subprocess.Popen(
            [PATH, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            port, path = _address(Path(folder) / "DevToolsActivePort", process)
            with ExitStack() as stack:

                def link(path: str) -> Link:
                    address = f"ws://127.0.0.1:{port}{path}"
                    return Link(stack.enter_context(connect(address, max_size=None)))

                root = link(path)

                def new_tab() -> Tab:
                    target = root.send("Target.createTarget", url="about:blank")["targetId"]
                    return Tab(link(f"/devtools/page/{target}"))

                yield new_tab
        finally:
            process.terminate()
            process.wait(60)


def _address(file, process):
    until = time.monotonic() + 120
    while not (file.exists() and len(lines := file.read_text().splitlines()) == 2):
        assert process.poll() is None, "chromium ended during its start"
        assert time.monotonic() < until, "chromium does not start"
        time.sleep(0.05)
    return lines
