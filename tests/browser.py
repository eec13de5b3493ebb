"""A headless Chromium for tests, over its debugging pipe: no driver, no port."""

import json
import os
import shutil
import subprocess
import tempfile


def find():
    names = "chromium", "chromium-browser", "google-chrome", "chrome"
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A browser with one page, or several in turn. `problems` collects errors of the console, of
    scripts and of loading, `requested` the addresses.
    """

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def as_3_and_4():  # where Chromium looks for its pipe
            low = os.dup(theirs_in)
            high = os.dup(theirs_out)
            os.dup2(low, 3), os.dup2(high, 4)

        quiet = "gpu quic background-networking component-update sync dev-shm-usage"
        self.process = subprocess.Popen(
            [find(), "--headless=new", "--no-sandbox", "--no-first-run", "--remote-debugging-pipe"]
            + [f"--disable-{name}" for name in quiet.split()]
            + [f"--user-data-dir={self.profile.name}", "about:blank"],
            preexec_fn=as_3_and_4,
            pass_fds=(3, 4, theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in), os.close(theirs_out)
        self.reader = os.fdopen(ours_in, "rb")
        self.writer = os.fdopen(ours_out, "wb")
        self.count = 0
        self.session = None
        self.problems = []
        self.events = []
        self.rest = b""
        self.requested = []
        self.add_page()

    def add_page(self):
        """Open another page, `self.page`, on which all calls act from now on."""
        self.session = None
        self.page = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=self.page, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close_page(self, page):
        self.call("Target.closeTarget", targetId=page)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.reader.close(), self.writer.close()
        self.profile.cleanup()

    def _message(self):
        while b"\0" not in self.rest:
            data = os.read(self.reader.fileno(), 1 << 16)
            if not data:
                raise RuntimeError("Chromium has gone")
            self.rest += data
        one, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(one)
        method = message.get("method")
        details = message.get("params", {})
        if (
            method == "Runtime.exceptionThrown"
            or method == "Network.loadingFailed"
            or (method == "Log.entryAdded" and details["entry"]["level"] == "error")
            or (method == "Runtime.consoleAPICalled" and details["type"] in ("error", "assert"))
        ):
            self.problems.append(details)
        if method == "Network.requestWillBeSent":
            self.requested.append(details["request"]["url"])
        if method:
            self.events.append(method)
        return message

    def call(self, method, **params):
        self.count += 1
        message = dict(
            id=self.count,
            method=method,
            params=params,
            **({"sessionId": self.session} if self.session else {}),
        )
        self.writer.write(json.dumps(message).encode() + b"\0")
        self.writer.flush()
        while (answer := self._message()).get("id") != self.count:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path, width, height=900):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.events.clear()
        self.call("Page.navigate", url=path if str(path).startswith("http") else f"file://{path}")
        while "Page.loadEventFired" not in self.events:
            self._message()

    def ask(self, expression):
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")
