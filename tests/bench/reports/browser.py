"""Chromium without a screen and without a network, over its DevTools protocol: as much of it as looking at a page needs."""

import contextlib
import itertools
import json
import pathlib
import shutil
import subprocess
import tempfile
import time
import urllib.request

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)


def find():
    """Its path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page; `events` are the notices that Chromium sent so far."""

    def __init__(self, socket):
        self._socket = socket
        self._numbers = itertools.count(1)
        self.events = []

    def call(self, method, **parameters):
        """The result; raises what Chromium says of a call that fails."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") != number:
                self.events.append(message)
            elif "error" in message:
                raise RuntimeError(message["error"])
            else:
                return message["result"]

    def open(self, url):
        """Go there, and wait until everything of it is loaded."""
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self._socket.recv(timeout=60)))

    def ask(self, expression):
        """What JavaScript makes of it."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def of(self, *methods):
        """The parameters of the events of these names."""
        return [event["params"] for event in self.events if event.get("method") in methods]


@contextlib.contextmanager
def chromium():
    """A tab of a browser of its own, whose files are gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [find(), *FLAGS, f"--user-data-dir={home}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = _port(pathlib.Path(home) / "DevToolsActivePort", process)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=60) as answer:
                tab = next(found for found in json.load(answer) if found["type"] == "page")
            with connect(tab["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
            process.wait(60)


def _port(file, process, patience_s=60.0):
    """Where it listens, once it says so."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until and process.poll() is None:
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    raise TimeoutError(f"{process.args[0]} does not listen (exit status {process.returncode})")
