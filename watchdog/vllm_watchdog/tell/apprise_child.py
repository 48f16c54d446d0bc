"""A program of its own: one message through Apprise.  `{"url", "title", "body", "kind", "limit_s"}` on standard input;
`{"ok", "status", "retry_after", "error", "said"}` on standard output.

In a process, since Apprise's time-outs are per socket operation and it may sleep between its own tries: whoever started
it ends it.  On standard input, since a command line can be read by every user of the host.  The kernel ends it with its
parent, and an alarm in any case.
"""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import sys
from typing import Any

import apprise
import requests.adapters

KINDS = {"warning": "warning", "critical": "failure", "page": "failure", "over": "success", "test": "info"}
PR_SET_PDEATHSIG = 1        # prctl.h
LOGGER = logging.getLogger("apprise")


class Ear(logging.Handler):
    """Hears what Apprise says only to its log: why a service did not take the message."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING or text.startswith(("Socket Exception", "Response Details")):
            self.said.append(text)


class Wire(requests.adapters.HTTPAdapter):
    """Keeps the last answer, of which Apprise tells only that it was a "no"."""

    status: int | None = None
    retry_after = error = ""

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        try:
            reply = super().send(*args, **kwargs)
        except Exception as error:
            Wire.status, Wire.retry_after, Wire.error = None, "", type(error).__name__
            raise
        Wire.status, Wire.retry_after, Wire.error = reply.status_code, reply.headers.get("Retry-After", ""), ""
        return reply


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    asked = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_REAL, asked["limit_s"])      # SIGALRM's default ends the process
    ear = Ear()
    LOGGER.addHandler(ear)
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False
    requests.sessions.HTTPAdapter = Wire    # what every Session mounts
    asset = apprise.AppriseAsset(
        app_id="llm-watchdog", app_desc="llm-watchdog", app_url="", image_url_mask="", image_url_logo="", async_mode=False,
        plugin_paths=[], storage_path=None)
    target = apprise.Apprise.instantiate(asked["url"], asset=asset, suppress_exceptions=True)
    ok = False
    if target is None:
        Wire.error = "Apprise does not know this address"
        ear.said = ["see https://appriseit.com/services"]
    elif asked.get("title") is None:
        ok = True                                               # only the address was to be looked at
    else:
        target.overflow_mode = apprise.OverflowMode.TRUNCATE    # one message, whatever its service's limit
        told = apprise.Apprise(asset=asset)
        told.add(target)
        ok = bool(told.notify(title=asked["title"], body=asked["body"], notify_type=KINDS[asked["kind"]],
                              body_format=apprise.NotifyFormat.TEXT))
    json.dump({"ok": ok, "status": Wire.status, "retry_after": Wire.retry_after, "error": Wire.error, "said": ear.said[-4:]},
              sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
