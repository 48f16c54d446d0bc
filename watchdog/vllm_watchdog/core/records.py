"""What one line of output is: a vLLM record, a server line, an access line, raw text, or a kernel line.

Every rule about failures stands on this: a fragment counts only in the place where vLLM,
    torch or the kernel would print
it, so a prompt, a URL or a model name that quotes a failure is never one.  vLLM repeats the whole prefix on each line
of a multi-line record, which is what makes the anchoring safe: a record's own text can never begin a line.
Pure: text in, frozen records out; it never blocks, and one line costs at most `LINE_LIMIT` characters of work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LINE_LIMIT = 65_536  # characters of one line that are looked at; scheduler dumps reach tens of kilobytes
JSON_LINES_LIMIT = 512  # lines of one JSON record (a traceback of 200 frames has about 400)


class Kind(StrEnum):
    RECORD = "record"  # a line in vLLM's own format: level, time, file and line
    SERVER = "server"  # uvicorn's own words: "INFO:     Shutting down", or the terminal's: "^C"
    ACCESS = "access"  # uvicorn's access log: holds URLs, proves only that the port answers
    RAW = "raw"  # tracebacks, C++ output, progress bars, prints
    KERNEL = "kernel"  # dmesg, /dev/kmsg, journal or syslog with the tag "kernel"


class Stream(StrEnum):
    ENGINE = "engine"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class Record:
    """One line, taken apart.

    `message` has lost every prefix, colour and carriage return; `file` is the base name of the Python file that
    logged it; `process` and `pid` come from "(EngineCore pid=9) " and are "" and 0 where the line carries none.
    """

    kind: Kind
    message: str
    process: str = ""
    pid: int = 0
    level: str = ""
    file: str = ""
    lineno: int = 0

    @property
    def raw(self) -> bool:
        return self.kind is Kind.RAW

    @property
    def site(self) -> tuple[str, int, str, int]:
        """Where it was logged: the lines of one traceback share it."""
        return self.process, self.pid, self.file, self.lineno


_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LEVEL = r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_PROCESS = r"(?:\((?P<process>[\w:.+-]+)(?: [^()]*?)?pid=(?P<pid>\d+)[^()]{0,60}\) ?)"
# VLLM_LOGGING_PREFIX is free text: one word that is no mere word, or bracketed groups; no quotes, and never a sentence
_FREE = r"(?:(?=[^ ]*[\W\d_])[^\s\"'`(){}]{1,40} |(?:[\[<][^\]>\"'`]{0,40}[\]>] ?){1,2})?"
# Whoever relays the engine's words may name the time and itself, in at most two levels of brackets (Ray Data does)
_RELAY = (
    r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? (?=\())?"
    r"(?:\((?:[^()]|\((?:[^()]|\([^()]{0,60}\)){0,60}\)){1,80}\) (?=\())?"
)
_RECORD = re.compile(
    rf"{_FREE}{_RELAY}(?:{_PROCESS}{_FREE})?{_LEVEL} +"
    r"(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? "
    r"\[?(?P<path>[\w./-]{1,200}\.py):(?P<lineno>\d+)\] ?(?P<message>.*)",
    re.DOTALL,
)
_PREFIXED = re.compile(rf"{_FREE}{_RELAY}{_PROCESS}(?P<message>.*)", re.DOTALL)
_UVICORN = re.compile(rf"{_LEVEL}:\s{{2,10}}(?P<message>.*)", re.DOTALL)
_ACCESS = re.compile(r'\S.{0,80}? - "[A-Z]{3,7} \S.* HTTP/1\.\d" \d{3}\b')

# What docker compose, container runtimes, journald and syslog put in front of an engine's own line.
_BSD_TIME = r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?"
_ISO_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_HOST, _TAG = r"[\w.-]{1,80}", r"[\w./@:-]{1,60}?"
_SYSLOG = re.compile(rf"(?:<\d+>)?(?:{_BSD_TIME}|{_ISO_TIME}) {_HOST} (?P<tag>{_TAG})(?:\[\d+\])?: ")
_TRANSPORT = re.compile(
    rf"(?:(?:<\d+>)?{_BSD_TIME} {_HOST} {_TAG}(?:\[\d+\])?: "
    rf"|(?:<\d+>)?{_ISO_TIME} {_HOST} {_TAG}\[\d+\]: "  # with a PID: `kubectl logs --timestamps` has words there
    rf"|{_ISO_TIME} (?:std(?:out|err) [FP] )?"
    r"|[\w.-]{1,60} +\| "
    r"|\[pod/[^\]]{1,120}\] )+"
)
_DMESG = re.compile(
    r"(?:(?:kern|user|daemon) *:\w+ *: )?(?:<\d+>)?\[ *\d+\.\d+(?:, *\d+)?\] ?"
    r"|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] "
)
_KMSG = re.compile(r"\d{1,4},\d+,\d+,[^;]{1,40};")
_BARE_KERNEL = re.compile(r"\s*NVRM: |(?:Memory cgroup o|O)ut of memory: Kill(?:ed)? process \d+ \(|oom-kill:constraint=")
_INTERRUPT = "^C"  # a terminal echoes Ctrl+C and breaks no line
_ECHOES = re.compile(r"(?:\^C)+")
_PROGRESS = re.compile(r"[^\n]{0,200}?\d+%[^\n]{0,200}?(?:it/s|s/it)[^\]\n]{0,60}\]\s?")


def parse(line: str) -> tuple[Record, ...]:
    """The records of one line, without its newline: one for text, one a line of message and traceback for JSON."""
    text = _ANSI.sub("", line[:LINE_LIMIT]).rstrip("\r\n").lstrip("\0")
    if echo := _ECHOES.match(text):
        return (Record(Kind.SERVER, _INTERRUPT), *parse(text[echo.end() :]))
    if text.startswith("{"):
        return _parse_json(text) or (Record(Kind.RAW, text),)
    if kernel := _parse_kernel(text):
        return (kernel,)
    return (_parse_engine(text),)


def stream_of(lines: Iterable[str]) -> Stream | None:
    """Which stream the first lines come from; None where they do not tell, or a journal mixes both."""
    engine = kernel = 0
    for line in lines:
        kind = parse(line)[0].kind
        kernel += kind is Kind.KERNEL
        engine += kind in (Kind.RECORD, Kind.SERVER, Kind.ACCESS)
    if engine > kernel:
        return Stream.ENGINE
    return Stream.KERNEL if kernel and not engine else None


def _parse_kernel(text: str) -> Record | None:
    for pattern in (_DMESG, _KMSG):
        if match := pattern.match(text):
            return Record(Kind.KERNEL, text[match.end() :].strip())
    if (match := _SYSLOG.match(text)) and match["tag"] == "kernel":
        rest = text[match.end() :]
        stamp = _DMESG.match(rest)
        return Record(Kind.KERNEL, rest[stamp.end() if stamp else 0 :].strip(), "kernel")
    if _BARE_KERNEL.match(text):  # `journalctl -k -o cat`, or the continuation of a kernel line
        return Record(Kind.KERNEL, text.strip())
    return None


def _parse_engine(text: str) -> Record:
    if match := _TRANSPORT.match(text):
        text = text[match.end() :]
    if match := _RECORD.match(text) or _behind_a_bar(text):
        process, pid = match["process"] or "", int(match["pid"] or 0)
        file = match["path"].rsplit("/", 1)[-1]
        return Record(Kind.RECORD, match["message"], process, pid, match["level"], file, int(match["lineno"]))
    process, pid = "", 0
    if match := _PREFIXED.match(text):
        process, pid, text = match["process"], int(match["pid"]), match["message"]
    if match := _UVICORN.match(text):
        kind = Kind.ACCESS if _ACCESS.match(match["message"]) else Kind.SERVER
        return Record(kind, match["message"], process, pid, match["level"])
    return Record(Kind.RAW, text.rsplit("\r", 1)[-1], process, pid)


def _behind_a_bar(text: str) -> re.Match[str] | None:
    """A record on one line with a progress bar, which ends in no newline."""
    if _UVICORN.match(text):
        return None
    bar = _PROGRESS.match(text)
    return _RECORD.match(text, bar.end()) if bar else _RECORD.match(text, text.rfind("\r") + 1)


def _parse_json(text: str) -> tuple[Record, ...]:
    """`--logging-config.formatter json`: one object a record, uvicorn's too, with a traceback in `exc_info`."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    for key in ("log", "MESSAGE"):  # Docker's json-file driver and `journalctl -o json` wrap each line
        if isinstance(entry.get(key), str):
            return parse(entry[key])
    level = str(entry.get("levelname") or entry.get("level") or "").upper()
    if not level or not ("message" in entry or "exc_info" in entry):
        return ()
    logger = str(entry.get("name") or entry.get("logger") or "")
    process = str(entry.get("vllm_process_name") or entry.get("processName") or "")
    pid, message = _whole(entry.get("process")), str(entry.get("message") or "")
    trace = str(entry.get("exc_info") or "").split("\n")
    if logger.startswith("uvicorn"):
        kind = Kind.ACCESS if _ACCESS.match(message) else Kind.SERVER
        return Record(kind, message, process, pid, level), *(Record(Kind.RAW, line, process, pid) for line in _few(trace))
    file = str(entry.get("filename") or f"{logger.rsplit('.', 1)[-1]}.py")
    lineno, lines = _whole(entry.get("lineno")), _few([*message.split("\n"), *trace])
    return tuple(Record(Kind.RECORD, line.rstrip("\r"), process, pid, level, file, lineno) for line in lines)


def _few(lines: list[str]) -> list[str]:
    return [line for line in lines[:JSON_LINES_LIMIT] if line]


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def is_probe(line: str) -> bool:
    """The access line of a health check or a scrape: two a second from us alone, and they say nothing."""
    return any(f'"GET {path} HTTP/' in line for path in ("/health", "/metrics"))
