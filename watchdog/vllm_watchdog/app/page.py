"""The wiring of the web page: what it reads, and whom it asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_watchdog.config import Settings
from vllm_watchdog.say import Say
from vllm_watchdog.tell.control import Control
from vllm_watchdog.tell.history import HistoryError, Reader
from vllm_watchdog.tell.samples import RECENT, Samples
from vllm_watchdog.web.api import Sources, Unavailable
from vllm_watchdog.web.server import Web

T = TypeVar("T")


def web(settings: Settings, control: Control, report: Callable[[], dict[str, Any]], reader: Reader, samples: Samples,
        say: Say) -> Web:
    """The page on `daemon.listen`, which must be set."""
    daemon = settings.daemon
    sources = Sources(
        report=report,
        ask=control.ask,
        incidents=_readable(reader.incidents),
        incident=_readable(reader.incident),
        samples=_readable(lambda name, since: sampled(reader, samples, name, since)),
        incidents_dir=daemon.log_dir / "incidents",
        engines={name: launch.url for name, launch in settings.launches().items()},
    )
    return Web(daemon.host, daemon.port, daemon.token.get_secret_value() if daemon.token else "", sources, say)


def sampled(reader: Reader, samples: Samples, name: str, since: float = 0.0) -> dict[str, Any]:
    """Raises KeyError for a range that is not kept, HistoryError."""
    now = time.time()
    return samples.recent(now, since) if name == RECENT else reader.samples(name, now, since)


def _readable(call: Callable[..., T]) -> Callable[..., T]:
    def asked(*values: Any) -> T:
        try:
            return call(*values)
        except HistoryError as error:
            raise Unavailable(str(error)) from None

    return asked
