"""APScheduler's part: it knows when to sample, and does nothing but wake the sensors, so nothing can hang in its pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from apscheduler.schedulers.background import BackgroundScheduler

# A wake that falls out because the last one is not over yet is meant, and no warning.
logging.getLogger("apscheduler").setLevel(logging.ERROR)


class Sampling:
    """Wakes each sensor every `period_s` seconds.  A wake that comes late is one wake, not a queue of them."""

    def __init__(self, period_s: float, wakes: Sequence[Callable[[], None]]) -> None:
        self._scheduler = BackgroundScheduler(
            timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None})
        self._scheduler.add_job(lambda: [wake() for wake in wakes], "interval", seconds=period_s)

    def start(self) -> None:
        self._scheduler.start()

    def stop(self, _: float) -> None:
        self._scheduler.shutdown(wait=False)
