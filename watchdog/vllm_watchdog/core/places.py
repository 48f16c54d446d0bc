"""Where a failure text is believed: the places of the catalogue, and the row type that ties text to place.

A fragment counts only in its place and anchored at the start of the text there, after nothing but exception names; a
prompt, a request id or a model name that quotes it is elsewhere.  `*` in a fragment stands for a few characters.
Every row knows the literal (`needles`) without which it can't match, which is all that a block scanner needs.  Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum, auto

from vllm_watchdog.core.records import Kind, Record

ENGINE_FILES = frozenset({
    "async_llm.py", "async_llm_engine.py", "client.py", "core.py", "core_client.py", "engine.py",
    "engine_core_sentinel.py", "gpu_worker.py", "launcher.py", "llm_engine.py", "multiproc_executor.py",
    "multiproc_gpu_executor.py", "multiproc_worker_utils.py", "ray_distributed_executor.py", "ray_executor_v2.py",
    "ray_gpu_executor.py", "uniproc_executor.py", "utils.py", "watch_dog.py", "worker_base.py",
})
SEVERE = frozenset({"ERROR", "CRITICAL"})


class Phase(StrEnum):
    UNKNOWN = "unknown"     # an excerpt that has not told yet
    STARTUP = "startup"
    SERVING = "serving"
    SHUTDOWN = "shutdown"   # somebody asked for it: nothing that follows is a symptom


class Place(StrEnum):
    """Where a fragment is taken seriously."""

    ENGINE = auto()     # a severe record of an engine file
    RAISED = auto()     # the same, or the last line of a bare traceback
    NATIVE = auto()     # the same, or torch's C++ log ("[rank0]:[E…"), or what() of a C++ exception
    LINE = auto()       # a bare line that begins so
    SERVER = auto()     # uvicorn's own line
    NOTE = auto()       # a record of exactly these files, whatever its level


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the catalogue.  `recoverable`: alone it does not prove that the engine died."""

    class_: str
    rank: int
    place: Place
    pattern: re.Pattern[str]
    bare: re.Pattern[str] | None
    needles: tuple[str, ...]
    phases: frozenset[Phase]
    files: frozenset[str]
    recoverable: bool = False

    def matches(self, record: Record) -> bool:
        if record.kind is Kind.RECORD:
            if self.place in (Place.LINE, Place.SERVER) or record.file not in self.files:
                return False
            severe = self.place is Place.NOTE or record.level in SEVERE
            return severe and self.pattern.match(record.message) is not None
        if self.place is Place.SERVER:
            return record.kind is Kind.SERVER and self.pattern.match(record.message) is not None
        return record.kind is Kind.RAW and self.bare is not None and self.bare.match(record.message) is not None


_RANK0 = r"(?:\[rank\d+\]: ?)?"
_CHAIN = r"(?:[\w.]+(?:\([\w.]+\))?: ?){0,6}"
_RAISED = r"(?:\w[\w.]*(?:Error|Exception|Failed)(?:\([\w.]+\))?: ?){1,6}"
_WORKER = r"(?:\(?['\"]?Worker failed with error (?:%s[^'\"]{0,120}['\"], )?['\"]?)?"   # the executor quotes its worker
_NATIVE = r"(?:(?:\[rank\d+\]:)?\[[EF][^\]]{0,80}\] .{0,400}?|\s*what\(\):\s+.{0,200}?)"
_PATH = r"(?:[\w.]+\.)?"
_NAMES_ITS_CLASS = re.compile(r"[\w.*]*(?:Error|Exception|Failed|exc\.)")
ANY = frozenset(Phase)
STARTING = frozenset({Phase.STARTUP, Phase.UNKNOWN})


def _glob(fragment: str) -> str:
    return r".{0,400}?".join(re.escape(part) for part in fragment.split("*"))


def row(
    class_: str, rank: int, place: Place, *fragments: str,
    phases: frozenset[Phase] = ANY, files: frozenset[str] = ENGINE_FILES, recoverable: bool = False,
) -> Row:
    """A row of the table from its fragments."""
    named = [_glob(each) for each in fragments if _NAMES_ITS_CLASS.match(each)]
    plain = [_glob(each) for each in fragments if not _NAMES_ITS_CLASS.match(each)]
    every = "|".join(named + plain)
    bare: str | None = None
    if place in (Place.RAISED, Place.NATIVE):
        raised = [rf"(?:{_RAISED})?{_PATH}(?:{'|'.join(named)})"] if named else []
        raised += [rf"{_RAISED}{_WORKER}(?:{'|'.join(plain)})"] if plain else []
        raised += [rf"{_NATIVE}(?:{every})"] if place is Place.NATIVE else []
        bare = rf"{_RANK0}(?:{'|'.join(raised)})"
    elif place is Place.LINE:
        bare = every
    pattern = every if place in (Place.SERVER, Place.NOTE) else rf"{_RANK0}{_CHAIN}{_WORKER}{_PATH}(?:{every})"
    needles = tuple(max(each.split("*"), key=len) for each in fragments)
    return Row(class_, rank, place, re.compile(pattern, re.DOTALL), re.compile(bare, re.DOTALL) if bare else None,
               needles, phases, files, recoverable)
