from __future__ import annotations

import platform
import subprocess
import sys

import pytest

ARENAS = """
import ctypes, sys, threading
from vllm_watchdog.app.malloc import keep_little
if sys.argv[1] == "little":
    keep_little()
met = threading.Barrier(8)
def work():
    kept = [bytes(2000) for _ in range(100)]    # too large for Python's own allocator
    met.wait(10)
threads = [threading.Thread(target=work) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


def arenas(how: str) -> int:
    said = subprocess.run([sys.executable, "-c", ARENAS, how], capture_output=True, text=True, timeout=30, check=True)
    return said.stdout.count("<heap nr=")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_threads_share_one_arena_so_that_what_one_has_freed_serves_the_next() -> None:
    assert arenas("little") == 1 < arenas("as it is")
