"""How fast a log is classified, beside `grep -E` and ripgrep on the same bytes in the same run, and whether a tail keeps up.

    python -m tests.bench.scan [scanned|tailed]... [--mb 300]

`scanned`: MB/s on one core, the file in memory, medians of 5: ours finds, parses and judges; grep and ripgrep only count
lines that hold one of the same literals, each thousandth or so, and must count what ours lets through.  `tailed`: 50 MB/s
for ten seconds.
"""

from __future__ import annotations

import argparse
import io
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

from tests.bench.table import Row, program, show

from vllm_watchdog.core.readings import Mark
from vllm_watchdog.core.records import Stream
from vllm_watchdog.core.verdict import Reader
from vllm_watchdog.sense import scan
from vllm_watchdog.sense.logtail import LogTail

FLOOD_MBS, FLOOD_S = 50, 10.0


def benign(size: int) -> bytes:
    """An hour of an old, talkative vLLM: access lines, prompts, stats each few hundred lines; 99.9 % says nothing."""
    chance = random.Random(7)
    words = ("memory", "the model", "answers", "a long question", "about", "kernels", "and", "trains of thought")
    out = bytearray(b"INFO:     Application startup complete.\n")
    number = 0
    while len(out) < size:
        number += 1
        prompt = " ".join((*chance.choices(words, k=chance.randrange(5, 60)), said(number, 330)))
        out += (
            f"INFO 05-20 10:00:{number // 10 % 60:02} [logger.py:39] Received request chatcmpl-{number:08x}: "
            f"prompt: '{prompt}', params: SamplingParams(n=1, temperature=0.7, max_tokens=256), lora_request: None.\n"
            f"INFO 05-20 10:00:00 [async_llm.py:252] Added request chatcmpl-{number:08x}.\n"
            f'INFO:     192.0.2.{number % 250}:40100 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        ).encode()
        if number % 250 == 0:
            out += (
                b"INFO 05-20 10:00:10 [loggers.py:111] Engine 000: Avg prompt throughput: 120.4 tokens/s, Avg generation "
                b"throughput: 310.0 tokens/s, Running: 6 reqs, Waiting: 0 reqs, GPU KV cache usage: 7.0%, Prefix cache "
                b"hit rate: 12.3%\n"
            )
    return bytes(out)


def ours(data: bytes) -> str:
    scanner, reader = scan.Scanner(), Reader(Stream.ENGINE)
    source = io.BytesIO(data)
    while block := source.read(scan.BLOCK_BYTES):
        for number, text in scanner.feed(block):
            reader.feed(text, number)
    return reader.verdict().class_


def grep(path: Path, locale: str) -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".ere") as expressions:
        expressions.write("|".join(re.sub(r"([][\\.^$*+?(){}|])", r"\\\1", each) for each in scan.needles()))
        expressions.flush()
        command = ["grep", "-cE", "-f", expressions.name, str(path)]
        # counted through a pipe: to /dev/null, grep would stop at the first match
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"LC_ALL": locale})
    return int(done.stdout)


def ripgrep(path: Path, program_: str) -> int:
    literals = [word for each in scan.needles() for word in ("-e", each)]
    words = [program_, "-c", "-j", "1", "-F", "--no-config", *literals, str(path)]
    return int(subprocess.run(words, capture_output=True, text=True, check=False).stdout or 0)


def candidates(data: bytes) -> int:
    """Lines that hold a literal, as grep counts them."""
    search, found, rest = scan.Search(), 0, b""
    for start in range(0, len(data), scan.BLOCK_BYTES):
        block = rest + data[start : start + scan.BLOCK_BYTES]
        cut = block.rfind(b"\n") + 1
        found += len({block.rfind(b"\n", 0, hit) for hit in search(block[:cut])})
        rest = block[cut:]
    return found + bool(search(rest))


def speed(size: int, work: Callable[[], object], times: int = 5) -> float:
    """MB/s, the median."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return size / 1e6 / median(took)


def prompts(size: int) -> bytes:
    """Each line holds a prompt of some 8 kB, as `--enable-log-requests` writes it."""
    chance = random.Random(11)
    words = ("memory", "the model", "answers", "a long question", "about", "kernels", "and", "trains of thought")
    out, numbers = bytearray(b"INFO:     Application startup complete.\n"), count(1)
    while len(out) < size:
        prompt = " ".join((*chance.choices(words, k=1000), said(next(numbers), 100)))
        out += f"INFO 05-20 10:00:00 [logger.py:39] Received request x: prompt: '{prompt}', params: None.\n".encode()
    return bytes(out)


def said(number: int, each: int) -> str:
    """Now and then somebody asks a model what an error means."""
    return scan.needles()[number // each % len(scan.needles())] if number % each == 0 else ""


def scanned(folder: Path, size: int) -> Iterator[Row]:
    rg = program("rg")
    for title, make in (("benign lines", benign), ("long prompts", prompts)):
        data, path = make(size), folder / "primary.log"
        path.write_bytes(data)
        mine = speed(len(data), lambda: ours(data))     # noqa: B023 - called at once
        yield f"{title}: ours, found and judged", f"{mine:.0f} MB/s", "", None
        found = candidates(data)
        peers = {"grep -E, LC_ALL=C": partial(grep, path, "C")} | ({"ripgrep -F": partial(ripgrep, path, rg)} if rg else {})
        for name, search in peers.items():
            peer = speed(len(data), search)
            yield (f"{title}: {name}", f"{peer:.0f} MB/s, ours {mine / peer:.2f} x", ">= 1.5 x grep",
                   mine / peer >= 1.5 if name.startswith("grep") else None)
            yield "... lines that hold a literal: theirs, ours", f"{search()}, {found}", "equal", search() == found


def tailed(folder: Path, _: int) -> Iterator[Row]:
    """A log that grows by 50 MB/s for ten seconds, and a tail that follows it."""
    log, events = folder / "tail.log", SimpleQueue[Any]()
    log.touch()
    tail = LogTail("primary", log, folder / "place", events.put, time.monotonic, rotate_bytes=1 << 40)
    tail.start()
    tail.follow(Mark("primary", 1))
    time.sleep(0.2)
    block, before, behind = benign(FLOOD_MBS * 50_000), resident_mb(), []
    began = time.monotonic()
    with log.open("ab") as file:
        for number in range(int(FLOOD_S * 20)):
            file.write(block)
            file.flush()
            time.sleep(max(0.0, began + (number + 1) / 20 - time.monotonic()))
            behind.append((tail._file.size - tail._file.offset) / 1e6)
        written = file.tell() / 1e6 / (time.monotonic() - began)
    caught = time.monotonic()
    while tail._file.offset < log.stat().st_size and time.monotonic() < caught + 30:
        time.sleep(0.01)
    after = time.monotonic() - caught
    grown = resident_mb() - before
    tail.stop(5)
    yield (f"a log that grows by {written:.0f} MB/s: behind", f"at most {max(behind):.1f} MB, {after:.2f} s", "<= 1 s",
           after <= 1)
    yield "... memory grown", f"{grown:.1f} MB", "<= 8 MB", grown <= 8


def resident_mb() -> float:
    """What the process holds now; the peak would hide the engines behind the data."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


PARTS: dict[str, Callable[[Path, int], Iterator[Row]]] = {"scanned": scanned, "tailed": tailed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="|".join(PARTS))
    parser.add_argument("--mb", type=int, default=300)
    options = parser.parse_args()
    if unknown := set(options.names) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    missed = 0
    for name in options.names or PARTS:
        with tempfile.TemporaryDirectory(prefix="scan-", dir="/dev/shm") as folder:
            missed |= show(PARTS[name](Path(folder), options.mb * 1_000_000))
    return missed


if __name__ == "__main__":
    sys.exit(main())
