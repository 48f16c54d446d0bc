"""`llm-watchdog classify FILE… [--json]`: the verdict on any vLLM or kernel log, with the lines that prove it.

Needs no daemon and imports only what it needs.  Reads each file once, in blocks, with bounded memory; it blocks on the
file or standard input alone, for as long as that takes.  Exit 0: no failure; 1: a failure in at least one file
(warnings do not count); 2: an input that could not be read, whatever the others said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from vllm_watchdog.core.catalog import CATALOG, Severity
from vllm_watchdog.core.last_words import TAIL_BYTES, with_the_end
from vllm_watchdog.core.records import stream_of
from vllm_watchdog.core.verdict import HEAD_LINES, Reader, Verdict
from vllm_watchdog.sense.scan import BLOCK_BYTES, LINE_BYTES, Scanner

_PACKED = {
    b"\x1f\x8b": "gzip, try: zcat",
    b"\x28\xb5\x2f\xfd": "zstd, try: zstdcat",
    b"\xfd7zXZ": "xz, try: xzcat",
    b"BZh": "bzip2, try: bzcat",
}
_CONTROL = bytes(set(range(32)) - set(b"\0\t\n\v\f\r\x1b"))
_BINARY_SHARE = 0.05  # of control characters in the first block; logs hold none but tabs, returns and escapes


class UnreadableError(Exception):
    """An input that can't be classified; its text is one line for the user."""


def classify(paths: list[str], as_json: bool, out: TextIO) -> int:
    """Writes one verdict a path ("-" is standard input) to `out`; returns the exit code.  Errors go to stderr."""
    failed = unreadable = False
    for path in paths:
        try:
            verdict = read(path)
        except UnreadableError as error:
            sys.stderr.write(f"{error}\n")
            unreadable = True
            continue
        failed |= verdict.severity is Severity.FATAL
        out.write(
            f"{json.dumps(as_object(path, verdict), ensure_ascii=False)}\n" if as_json else as_text(path, verdict)
        )
    return 2 if unreadable else int(failed)


def read(path: str) -> Verdict:
    """The verdict on one file.  Raises `UnreadableError`."""
    try:
        if path == "-":
            return _judge(path, sys.stdin.buffer)
        with Path(path).open("rb") as file:
            return _judge(path, file)
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror or error}, expected a log file that can be read") from None


def _judge(path: str, file: BinaryIO) -> Verdict:
    blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
    head = _head(blocks)
    if trouble := _not_a_log(b"".join(head)):
        raise UnreadableError(f"{path}: {trouble}")
    lines = b"".join(head).split(b"\n")[:HEAD_LINES]
    tail = b""
    scanner, reader = Scanner(), Reader(stream_of(line.decode("utf-8", "replace") for line in lines))
    for source in (head, blocks):
        for block in source:
            tail = (tail + block)[-TAIL_BYTES:]
            for number, text in scanner.feed(block):
                reader.feed(text, number)
    for number, text in scanner.finish():
        reader.feed(text, number)
    return with_the_end(reader.verdict(), tail.decode("utf-8", "replace"), scanner.lines)


def _head(blocks: Iterator[bytes]) -> list[bytes]:
    """Enough blocks to tell which stream this is: HEAD_LINES lines, or what so many longest lines would take."""
    head: list[bytes] = []
    lines = size = 0
    for block in blocks:
        if not head and not block.strip(b"\0"):
            continue  # a log truncated under its writer begins with a hole of zeros
        head.append(block)
        lines += block.count(b"\n")
        size += len(block)
        if lines >= HEAD_LINES or size >= HEAD_LINES * LINE_BYTES // 4:
            break
    return head


def _not_a_log(head: bytes) -> str:
    for magic, what in _PACKED.items():
        if head.startswith(magic):
            return f"compressed ({what} FILE | llm-watchdog classify -), expected plain text"
    text = head[: 2 * BLOCK_BYTES].replace(b"\0", b"")
    if not text:
        return "empty, expected the output of vLLM or a kernel log"
    if len(text) - len(text.translate(None, _CONTROL)) > _BINARY_SHARE * len(text):
        return "binary, expected the output of vLLM or a kernel log"
    return ""


def as_object(path: str, verdict: Verdict) -> dict[str, Any]:
    """What `--json` prints: memory in bytes, durations in seconds."""
    details: dict[str, Any] = dict(verdict.details)
    if others := details.get("other_processes"):
        details["other_processes"] = [{"pid": pid, "bytes": held} for pid, held in others]
    return {
        "file": path,
        "class": verdict.class_,
        "severity": verdict.severity,
        "action": verdict.action,
        "phase": verdict.phase,
        "evidence": [{"line": line, "text": text} for line, text in verdict.evidence],
        "details": details,
        "advice": list(verdict.advice),
    }


def as_text(path: str, verdict: Verdict) -> str:
    """The same for a human."""
    rows = [f"{path}: {verdict.class_}: {CATALOG[verdict.class_].title.en}"]
    if verdict.severity is not Severity.NONE:
        rows.append(f"  {verdict.severity}, {verdict.phase}; action: {verdict.action}")
    rows += [f"  {line:>7}  {text}" for line, text in verdict.evidence]
    if verdict.details:
        facts = as_object(path, verdict)["details"].items()
        rows.append("  facts: " + ", ".join(f"{name}={value}" for name, value in facts))
    rows += [f"  → {each}" for each in verdict.advice]
    return "\n".join(rows) + "\n"
