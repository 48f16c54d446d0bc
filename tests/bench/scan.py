"""How fast a log is classified, beside `grep -E` and Python's `re` line by line on the same bytes in the same run.

    python tests/bench/scan.py [MB]

Prints MB/s and the ratio to ours; compare ratios, not the absolutes of one machine.
"""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from vllm_watchdog.core.records import Stream
from vllm_watchdog.core.verdict import Reader
from vllm_watchdog.sense import scan

BLOCK = 64 * 1024


def benign(size: int) -> bytes:
    """An hour of an old, talkative vLLM: access lines, prompts, stats each few hundred lines; 99.9 % says nothing."""
    chance = random.Random(7)
    words = ("memory", "the model", "answers", "a long question", "about", "kernels", "and", "trains of thought")
    out = bytearray(b"INFO:     Application startup complete.\n")
    count = 0
    while len(out) < size:
        count += 1
        prompt = " ".join(chance.choices(words, k=chance.randrange(5, 60)))
        out += (
            f"INFO 05-20 10:00:{count // 10 % 60:02} [logger.py:39] Received request chatcmpl-{count:08x}: "
            f"prompt: '{prompt}', params: SamplingParams(n=1, temperature=0.7, max_tokens=256), lora_request: None.\n"
            f"INFO 05-20 10:00:00 [async_llm.py:252] Added request chatcmpl-{count:08x}.\n"
            f'INFO:     192.0.2.{count % 250}:40100 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        ).encode()
        if count % 250 == 0:
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


def line_by_line(data: bytes) -> int:
    pattern = re.compile("|".join(map(re.escape, scan.needles())).encode())
    return sum(pattern.search(line) is not None for line in data.split(b"\n"))


def blocks_of(search: Callable[[bytes], object], data: bytes) -> None:
    for start in range(0, len(data), BLOCK):
        search(data[start : start + BLOCK])


def grep(path: Path, locale: str) -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".ere") as expressions:
        expressions.write("|".join(re.sub(r"([][\\.^$*+?(){}|])", r"\\\1", each) for each in scan.needles()))
        expressions.flush()
        command = ["grep", "-cE", "-f", expressions.name, str(path)]
        # counted through a pipe: to /dev/null, grep would stop at the first match
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"LC_ALL": locale})
    return int(done.stdout)


def timed(name: str, size: int, work: Callable[[], object], base: float | None = None) -> float:
    began = time.perf_counter()
    work()
    speed = size / 1e6 / (time.perf_counter() - began)
    print(f"{name:44} {speed:8.0f} MB/s" + (f"   ours is {base / speed:6.1f} × as fast" if base else ""))
    return speed


def resident_mb() -> float:
    """What the process holds now; the peak would hide the engines behind the data."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def main() -> None:
    size = int(float(sys.argv[1]) * 1e6) if len(sys.argv) > 1 else 100_000_000
    data = benign(size)
    before = resident_mb()
    blocks_of(scan.automaton().search, data[: 100 * BLOCK])
    print(
        f"{len(data) / 1e6:.0f} MB, {data.count(10)} lines, {len(scan.needles())} literals; "
        f"automaton adds {resident_mb() - before:.1f} MB"
    )
    base = timed("ours: scan + parse + judge (google-re2)", len(data), lambda: ours(data))
    timed("google-re2 alone, 64 KiB blocks", len(data), lambda: blocks_of(scan.automaton().search, data), base)
    try:
        import hyperscan
    except ImportError:
        pass
    else:
        before = resident_mb()
        database = hyperscan.Database()
        database.compile(
            expressions=[re.escape(each).encode() for each in scan.needles()],
            flags=[hyperscan.HS_FLAG_SINGLEMATCH] * len(scan.needles()),
        )
        print(f"hyperscan's database adds {resident_mb() - before:.1f} MB")
        timed(
            "hyperscan alone, 64 KiB blocks",
            len(data),
            lambda: blocks_of(lambda block: database.scan(block, match_event_handler=lambda *_: None), data),
            base,
        )
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        file.write(data)
        file.flush()
        timed("grep -E, LC_ALL=C", len(data), lambda: grep(Path(file.name), "C"), base)
        timed("grep -E, LC_ALL=C.UTF-8", len(data), lambda: grep(Path(file.name), "C.UTF-8"), base)
    part = data[: len(data) // 20]
    timed("Python re, line by line (5 % of it)", len(part), lambda: line_by_line(part), base)


if __name__ == "__main__":
    main()
