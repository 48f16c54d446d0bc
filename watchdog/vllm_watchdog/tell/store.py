"""What must survive the daemon, `state_dir/state.json`: read once at start, written whenever it changes.

`save` returns at once: a thread of its own writes the latest value and skips what was overtaken.  The file is replaced
whole and synced, so it is never half a value.  Never fatal: while it cannot be written that is said once a minute and
tried again each second.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_watchdog.core.codec import encode
from vllm_watchdog.core.memory import Memory
from vllm_watchdog.core.schema import CODEC
from vllm_watchdog.say import Say
from vllm_watchdog.tell.backlog import ended
from vllm_watchdog.tell.files import replace_whole, set_aside

size_limit = 16 << 20       # far more than 10 engines with open incidents; a file beyond it is not ours
retry_s = 1.0
complain_s = 60.0
idle_s = 60.0




def load(path: Path, wall: float, say: Say) -> Memory | None:
    """What the last daemon knew.  None: a first start, or a file that cannot be read, which is set aside and said.
    Raises OSError where the file may not be read at all."""
    try:
        with path.open("rb") as file:
            data = file.read(size_limit + 1)
    except FileNotFoundError:
        return None
    try:
        return _decoded(data)
    except (ValueError, RecursionError) as error:
        set_aside(path, wall, str(error), say)
        return None


def _decoded(data: bytes) -> Memory:
    if len(data) > size_limit:
        raise ValueError(f"over {size_limit >> 20} MiB")
    found = CODEC.decode(json.loads(data))
    if not isinstance(found, Memory):
        raise ValueError(f"expected a Memory, found a {type(found).__name__}")  # noqa: TRY004 - the file's fault
    return found


class Store:
    """Keeps one value that `core.codec` encodes.  `clock` is monotonic seconds.  The latest `save` wins.

    `first` is waited for before each writing: what must be on disk before this value is, within a limit of its own; and
    `give_way` before that, for a moment.
    """

    def __init__(self, path: Path, clock: Callable[[], float], say: Say, first: Callable[[], object] = lambda: None,
                 give_way: Callable[[], None] = lambda: None) -> None:
        self._path, self._clock, self._say, self._first, self._give_way = path, clock, say, first, give_way
        self._changed = threading.Condition()
        self._next: Any = None
        self._saved = True
        self._stopping = False
        self._complained_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Writes the latest value.  False: it could not be written within `deadline_s`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return ended(self._thread, deadline_s) and self._saved

    def save(self, value: Any) -> None:
        with self._changed:
            self._next, self._saved = value, False
            self._changed.notify_all()

    def flush(self, deadline_s: float) -> bool:
        """Waits until the latest value is on disk.  False: not within `deadline_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._saved, deadline_s)

    def _run(self) -> None:
        while not self._stopping or self._next:
            with self._changed:
                self._changed.wait_for(lambda: self._next or self._stopping, idle_s)
            self._give_way()
            with self._changed:
                value, self._next = self._next, None
            if value:
                self._first()
                self._write(value)

    def _write(self, value: Any) -> None:
        try:
            replace_whole(self._path, json.dumps(encode(value), ensure_ascii=False).encode("utf-8", "replace"))
        except OSError as error:
            self._failed(value, error)
            return
        with self._changed:
            self._saved = self._next is None
            self._changed.notify_all()

    def _failed(self, value: Any, error: OSError) -> None:
        if self._clock() - self._complained_at >= complain_s:
            self._complained_at = self._clock()
            self._say("store.failed", file=str(self._path), why=error.strerror or type(error).__name__)
        with self._changed:
            if self._stopping:
                return                  # the last try failed: `stop` tells it
            self._next = self._next or value
            self._changed.wait_for(lambda: self._stopping, retry_s)
