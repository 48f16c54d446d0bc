"""A process's name as others see it, set as the setproctitle package sets it for vLLM, but without that package.

`/proc/PID/cmdline` becomes the title padded with NUL bytes, and `/proc/PID/environ` is wiped with it: whoever looks for
a marker in the environment of a real EngineCore finds none, unless SPT_NOENV is set. Linux only; never blocks.
"""

from __future__ import annotations

import os
from pathlib import Path

# Places in /proc/PID/stat behind the name, see proc(5).
_STAT_PLACES = {"arg_start": 45, "arg_end": 46, "env_start": 47, "env_end": 48}


def comm(title: str) -> None:
    """Sets the thread's name, cut to 15 bytes by the kernel."""
    Path("/proc/self/comm").write_text(title[:15])


def title(text: str) -> None:
    """Sets the name and overwrites the argument area (and, without SPT_NOENV, the environment area behind it)."""
    comm(text)
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    at = {name: int(words[index]) for name, index in _STAT_PLACES.items()}
    end = at["arg_end"] if "SPT_NOENV" in os.environ else max(at["arg_end"], at["env_end"])
    size = end - at["arg_start"]
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(at["arg_start"])
        memory.write(text.encode()[: size - 1].ljust(size, b"\0"))
