"""The end of a log that explains nothing: its last lines, and what a shell or the kernel says there.

Bounded by what is given; every line is clipped and masked.  Pure.
"""

from __future__ import annotations

import re

from vllm_watchdog.core.catalog import CATALOG
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.details import clip
from vllm_watchdog.core.findings import Verdict
from vllm_watchdog.core.records import Kind, is_probe, parse
from vllm_watchdog.core.signatures import Phase

KEPT = 5                # lines
OURS = "# llm-watchdog: "      # the watchdog's own line above each generation
TAIL_BYTES = 8192       # of a log, in which they are looked for

_CRASHED = re.compile(
    r"(?:.{1,200}?: line \d+: +\d+ )?"      # bash names its script and the PID; a terminal prints the word alone
    r"(?:Segmentation fault|Aborted|Killed|Bus error|Illegal instruction|Floating point exception|Trace/breakpoint trap)"
    r"(?: +\(core dumped\))?(?: {2,}\S.*)?"
)
_NEVER_RAN = re.compile(
    r"[\w./-]{1,200}: .{0,300}(?:not found|: No such file or directory|: Permission denied|cannot execute.{0,80})"
    r"|[\w./-]{1,200}: can't open file .{1,400}"
)


def last_words(text: str) -> tuple[str, ...]:
    """The last lines that are not blank, nor ours, nor the answers to our own polls."""
    lines = (record.message for line in text.splitlines() if line.strip() and not is_probe(line) for record in parse(line))
    return tuple(clip(" ".join(line.split())) for line in lines if line.strip() and not line.startswith(OURS))[-KEPT:]


def with_the_end(verdict: Verdict, text: str, lines: int) -> Verdict:
    """`verdict`, or where it knows no failure what the end of the log, of so many `lines`, says of a crash."""
    stripped = text.rstrip()
    last = stripped.rpartition("\n")[2]
    record = parse(last)[-1]
    if verdict.class_ != "none" or verdict.phase == Phase.SHUTDOWN or record.kind is not Kind.RAW:
        return verdict
    class_ = ""
    if _CRASHED.fullmatch(record.message):
        class_ = "unexpected_exit"
    elif verdict.phase == Phase.UNKNOWN and _NEVER_RAN.fullmatch(record.message):   # vLLM itself said nothing yet
        class_ = "spawn_failed"
    if not class_:
        return verdict
    entry = CATALOG[class_]
    line = lines - max(0, text[len(stripped):].count("\n") - 1)
    return replace(verdict, class_=class_, severity=entry.severity, action=entry.action, evidence=((line, clip(last)),))
