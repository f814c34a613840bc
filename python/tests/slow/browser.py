"""A headless Chromium, spoken to over a pair of pipes (its DevTools protocol)."""

import base64
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import time

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0  # that an answer may take; a page of some MB on a busy machine needs several


def program() -> str | None:
    """The browser that is installed, or nothing."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class BrowserError(RuntimeError):
    """The browser has died, is silent, or refuses a command."""


class Browser:
    """One page. `events` are what the browser reported, in order: (method, parameters)."""

    def __init__(self, profile: pathlib.Path, width: int = 1366, height: int = 768) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        options = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update"),
            *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
            *(f"--user-data-dir={profile}", f"--window-size={width},{height}"),
        ]
        # The browser reads commands from descriptor 3 and answers on 4.
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash"),
                *(program() or PROGRAMS[0], *options, "about:blank"),
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.events: list[tuple[str, dict]] = []
        self._numbers, self._answers, self._rest = itertools.count(1), {}, b""
        try:
            self._attach(width, height)
        except BaseException:
            self.close()
            raise

    def _attach(self, width: int, height: int) -> None:
        targets = self.call("Target.getTargets", session=None)["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call(
            "Target.attachToTarget", session=None, targetId=page, flatten=True
        )["sessionId"]
        # Pages in frames report to us too.
        self.call(
            "Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True
        )
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        self.call(
            "Network.emulateNetworkConditions",
            **{"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
        )

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, session: str | None = "", **parameters: object) -> dict:
        """The answer to a command. session: of the page unless it is None."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session or self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while number not in self._answers:
            self._read(end - time.monotonic(), method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: pathlib.Path) -> None:
        """Open a file, and wait until its scripts have run."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> object:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise BrowserError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true. Raises BrowserError when it does not become so."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise BrowserError(f"not true within {seconds:g} s: {expression}")
            time.sleep(0.1)

    def click(self, selector: str, text: str | None = None) -> None:
        """Click the first element of a selector, or the first whose text is this."""
        self.until(f"({_FIND})({json.dumps(selector)}, {json.dumps(text)}) !== undefined", 20.0)
        self.evaluate(f"({_FIND})({json.dumps(selector)}, {json.dumps(text)}).click()")

    def screenshot(self, path: pathlib.Path) -> None:
        image = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(image))

    def errors(self) -> list[str]:
        """What went wrong in the page so far: exceptions, and errors in its console."""
        found = []
        for method, parameters in self.events:
            if method == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                found.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
                found.append(json.dumps(parameters["args"]))
        return found

    def requests(self) -> list[str]:
        """Addresses that the page has asked for."""
        return [
            parameters["request"]["url"]
            for method, parameters in self.events
            if method == "Network.requestWillBeSent"
        ]

    def _read(self, seconds: float, method: str) -> None:
        ready, _, _ = select.select([self._in], [], [], max(0.0, seconds))
        if not ready:
            raise BrowserError(f"{method}: no answer within {SECONDS:g} s")
        chunk = os.read(self._in, 1 << 20)
        if not chunk:
            raise BrowserError(f"{method}: the browser has ended")
        *messages, self._rest = (self._rest + chunk).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self.events.append((message["method"], message["params"]))
                if message["method"] == "Target.attachedToTarget":
                    self._watch(message["params"]["sessionId"])

    def _watch(self, session: str) -> None:
        """Have a frame report too; its answers are of no interest."""
        for domain in ("Runtime", "Log", "Network"):
            message = {"id": -next(self._numbers), "method": f"{domain}.enable", "params": {}}
            os.write(self._out, json.dumps({**message, "sessionId": session}).encode() + b"\0")


_FIND = """(selector, text) => [...document.querySelectorAll(selector)].find(
    (element) => text === null || element.textContent.trim() === text)"""
