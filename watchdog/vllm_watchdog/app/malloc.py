"""How the C library keeps what it frees.  Blocks on nothing.

glibc gives threads arenas of their own, eight a core, and each keeps the most that it ever held.  Evidence is taken in many
short threads, so a daemon grew by some 5 MiB a minute while engines failed, until sixteen arenas were full.  Only one
thread of Python runs at a time, so one arena is enough.  Not by MALLOC_ARENA_MAX: engines would inherit that.
"""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8      # malloc.h
LARGE_BYTES = 128 << 10     # glibc begins with it, but raises it up to 32 MiB; what is larger is given back when freed


def keep_little() -> None:
    """Before the first thread.  Another C library than glibc is left as it is."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
