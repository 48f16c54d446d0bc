"""What the daemon asks of its own process: signals, orphans, rights, memory, and an end when a thread fails.

Nothing here blocks.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable
from types import FrameType

EX_SOFTWARE = 70            # sysexits.h
PR_SET_CHILD_SUBREAPER = 36     # prctl.h
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4


def listen_to_signals(stop: Callable[[str], None], reload: Callable[[], object]) -> None:
    """`stop` hears the signal's name, in the main thread between two of its steps; `reload` runs in a thread of its own."""
    def ask(number: int, _: FrameType | None) -> None:
        stop(signal.Signals(number).name)

    def again(*_: object) -> None:
        threading.Thread(target=reload, name="reload", daemon=True).start()

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGHUP, again)


def keep_capabilities() -> None:
    """What systemd lends us (CAP_SYSLOG, for the kernel log) is not handed on to engines.  Before any thread starts."""
    ctypes.CDLL(None).prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def become_subreaper() -> None:
    """Orphans of our engines come to us rather than to init.  Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def settle_memory() -> None:
    """What was imported stays, so the garbage collector need not look at it again (30 ms each time); what the imports left
    free goes back to the kernel."""
    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).malloc_trim(0)


def crash(what: threading.ExceptHookArgs) -> None:
    """A bug in an adapter's thread ends the daemon, as one in the loop does: systemd starts the next, which adopts."""
    traceback.print_exception(what.exc_type, what.exc_value, what.exc_traceback)
    os._exit(EX_SOFTWARE)
