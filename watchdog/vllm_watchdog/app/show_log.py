"""`llm-watchdog logs ENGINE`: the engine's own log, with the lines that are findings marked, and our probes left out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from vllm_watchdog.core.records import is_probe
from vllm_watchdog.core.verdict import Reader

FOLLOW_S = 0.2
BLOCK = 1 << 20


def show_log(path: Path, lines: int, follow: bool, out: TextIO) -> int:
    """The last `lines` lines, then, with `follow`, what comes.  Reads at most the last MiB to begin with."""
    reader = Reader()
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - BLOCK))
            last = deque(_shown(reader, file.read()), maxlen=lines)
            print(*last, sep="\n", file=out, flush=True)
            while follow:
                if not (block := file.read(BLOCK)):
                    threading.Event().wait(FOLLOW_S)
                for line in _shown(reader, block):
                    print(line, file=out, flush=True)
    except OSError as error:
        print(f"{path}: {error.strerror}: expected the engine's log; it is made at its first start", file=out)
        return 1
    return 0


def _shown(reader: Reader, block: bytes) -> Iterator[str]:
    """Every line but those of health checks and scrapes."""
    for raw in block.splitlines():
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        finding = reader.feed(line)
        if not is_probe(line):
            yield f"{line}    <== {finding.class_}, {finding.action}" if finding else line
