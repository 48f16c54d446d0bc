"""Wakes a thread when a file is written to, or when somebody rings: inotify and an eventfd behind one `wait`.

inotify only says when to look, never what is there: it misses what a rotation does, and a host may have none left.  Without
it `armed` is False, and whoever waits looks by the clock.  For one thread; `ring` for any.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading

IN_MODIFY, IN_MOVE_SELF, IN_DELETE_SELF = 0x2, 0x800, 0x400     # inotify.h
GATHER_S = 0.003    # an engine may write a thousand lines a second: they are read together
NOTICES = 4096      # bytes of them that are thrown away at once; the kernel merges those that are alike

_libc = ctypes.CDLL(None)


class Bell:
    def __init__(self) -> None:
        self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._notices = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)       # -1: the user has too many
        self._watched, self._watch = 0, -1
        self._lock = threading.Lock()       # nobody rings a descriptor that is somebody else's by now
        self._poll = select.poll()
        for fd in (self._rung, self._notices):
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)

    @property
    def armed(self) -> bool:
        return self._watch >= 0

    def listen(self, path: str, inode: int) -> bool:
        """To the file of this name, as long as it is this inode; 0: there is none.  True: from now on, so look once more."""
        if inode == self._watched or self._notices < 0:
            return False
        if self._watch >= 0:
            _libc.inotify_rm_watch(self._notices, self._watch)
        mask = IN_MODIFY | IN_MOVE_SELF | IN_DELETE_SELF
        self._watch = _libc.inotify_add_watch(self._notices, os.fsencode(path), mask) if inode else -1
        self._watched = inode if self._watch >= 0 else 0
        return self.armed

    def ring(self) -> None:
        with self._lock:
            if self._rung >= 0:
                os.eventfd_write(self._rung, 1)

    def wait(self, within_s: float) -> None:
        """Until it rings, or some GATHER_S after the first write."""
        ready = {fd for fd, _ in self._poll.poll(max(0.0, within_s) * 1000)}
        if self._notices in ready:
            if self._rung not in ready and select.select([self._rung], [], [], GATHER_S)[0]:
                ready.add(self._rung)
            os.read(self._notices, NOTICES)
        if self._rung in ready:
            os.eventfd_read(self._rung)

    def close(self) -> None:
        with self._lock:
            for fd in (self._rung, self._notices):
                if fd >= 0:
                    os.close(fd)
            self._rung = self._notices = self._watch = -1
