"""A headless Chromium, driven by its driver over HTTP (W3C WebDriver), with nothing but the standard library."""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Nothing of it is to reach for the network, or to ask.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's name for a reference
LEFT, RIGHT, HOME = "\ue012", "\ue014", "\ue011"  # keys


def chromium():
    return next(filter(None, map(shutil.which, NAMES)), None)


def skip_without():
    missing = [
        name for name, there in (("chromium", chromium()), ("chromedriver", shutil.which("chromedriver"))) if not there
    ]
    if missing:
        pytest.skip(f"not installed: {' and '.join(missing)} (Debian: apt-get install chromium chromium-driver)")


@contextlib.contextmanager
def browser(folder):
    """-> a Page. folder: an empty one, for the browser's profile."""
    skip_without()
    process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        started = next(found for line in process.stdout if (found := re.search(r"started .*on port (\d+)", line)))
        page = Page(f"http://127.0.0.1:{started[1]}/session", folder)
        try:
            yield page
        finally:
            page.call("DELETE", "")
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


class Page:
    def __init__(self, address, folder):
        self._address = address
        options = {"args": [*FLAGS, f"--user-data-dir={folder}"], "binary": chromium()}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self.call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/{made['sessionId']}"

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        # No proxy: it is this machine that answers.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from None

    def open(self, address):
        self.call("POST", "/url", {"url": address})

    def resize(self, width, height):
        """The window's inside, in pixels."""
        inside = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": inside})

    def run(self, script, *arguments):
        """The value of a JavaScript expression."""
        return self.call("POST", "/execute/sync", {"script": f"return {script}", "args": arguments})

    def dark(self, on):
        """Whether the reader's system prefers dark pages."""
        wanted = {"features": [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]}
        self.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": wanted})

    def screenshot(self):
        """What the window shows, as a PNG."""
        return base64.b64decode(self.call("GET", "/screenshot"))

    def text(self, selector):
        return self.run("document.querySelector(arguments[0]).textContent", selector)

    def press(self, selector, keys):
        """Give an element the focus and press keys there."""
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        self.call("POST", f"/element/{found[ELEMENT]}/value", {"text": keys})

    def complaints(self):
        """What the browser's console was told: errors of scripts, and what could not be loaded."""
        entries = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]
