"""The adapters of an engine, wired together: a real process in the engine's place, a tail that comes late."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from vllm_watchdog.app.engines import Engines
from vllm_watchdog.app.haste import Haste
from vllm_watchdog.core.commands import Kill, Spawn
from vllm_watchdog.core.events import Emptied, Event, Exited, LogRead
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.core.world import World
from vllm_watchdog.launch import Launch

ONE = Mark("primary", 1)
WORDS = "(APIServer pid=7) ERROR 10-26 21:05:17 [core.py:844] EngineCore encountered a fatal error."


def test_what_an_engine_writes_at_once_is_read_by_a_tail_that_is_held_up(tmp_path: Path) -> None:
    log = tmp_path / "primary.log"
    log.write_text("of an earlier generation\n" * 100)
    launch = Launch("primary", (sys.executable, "-S", "-c", f"print({WORDS!r})"), (), tmp_path, "127.0.0.1", 1, ("m",),
                    None, log)
    events, parts, free = queue.Queue[Event](), list[Any](), threading.Event()
    engines = Engines({"primary": launch}, f"engines{os.getpid()}", tmp_path, None, lambda _: None, events.put,
                      lambda part: parts.append(part) or part, World, lambda _: None, Haste(time.monotonic))
    engines._tails["primary"]._order(partial(free.wait, 10))     # as on a slow disk
    for part in parts:
        part.start()
    try:
        engines.do[Spawn](Spawn(ONE))
        while not isinstance(events.get(timeout=10), Exited):       # all that it wrote is there
            pass
        engines.do[Kill](Kill(ONE))
        assert isinstance(events.get(timeout=10), Emptied)
        free.set()
        read = events.get(timeout=10)
    finally:
        free.set()
        for part in parts:
            part.stop(5)
    assert isinstance(read, LogRead) and read.mark == ONE
    assert [finding.class_ for finding in read.findings] == ["engine_dead_v1"]
