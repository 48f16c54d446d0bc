"""Runs a module as a program that gets SIGTERM when the thread that started it ends, however it does.

    python -m vllm_watchdog.app.drill.leash MODULE ARG...
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1        # prctl.h

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
