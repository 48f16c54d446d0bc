"""A validation error of vLLM's settings: pydantic tells it over several lines, and the first one says the least.

    1 validation error for CacheConfig                                          the headline, a row of the catalogue
    gpu_memory_utilization                                                      the field; none where the whole is wrong
      Input should be less than or equal to 1 [type=…, input_value=80.0, …]     what is wrong with it

Only the first of several errors is read.  Pure: one record at a time, `LINES` lines at most.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_watchdog.core.details import Details
from vllm_watchdog.core.records import Record

HEADLINE = " validation error"
LINES = 4           # after the headline that may still belong to it; a line of another process may lie between
VALUE_LIMIT = 60    # characters of a value that are shown; a longer one is a whole structure

_HEADLINE = re.compile(r"\d+ validation errors? for (\w+)")
_FIELD = re.compile(r"[A-Za-z_][\w.\[\]-]{0,100}")
_WRONG = re.compile(r" {2}(\S.*?)(?: \[type=\w+, input_value=(.*), input_type=\w+\])?", re.DOTALL)
_SECRET = re.compile("key|token|secret|password", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Complaint:
    """A headline that waits for its next lines; `line` counts as in findings."""

    site: tuple[str, int, str, int]
    line: int
    headline: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    """The error in full, on one line, and its facts: config, field, problem, value."""

    line: int
    text: str
    details: Details


def begun(record: Record, line: int) -> Complaint | None:
    """None where the record is no headline."""
    return Complaint(record.site, line, record.message) if _HEADLINE.search(record.message) else None


def heard(complaint: Complaint, record: Record, line: int) -> Complaint | Whole | None:
    """What the next record makes of it; None once it can't be completed any more."""
    if line > complaint.line + LINES:
        return None
    if record.site != complaint.site:
        return complaint
    if wrong := _WRONG.fullmatch(record.message):
        return _whole(complaint, wrong[1], wrong[2] or "")
    if not complaint.field and _FIELD.fullmatch(record.message):
        return Complaint(complaint.site, complaint.line, complaint.headline, record.message)
    return None


def _whole(complaint: Complaint, problem: str, value: str) -> Whole:
    """A value is told only of a field whose name sounds like no secret."""
    sayable = complaint.field and 0 < len(value) <= VALUE_LIMIT and not _SECRET.search(complaint.field)
    config = _HEADLINE.search(complaint.headline)
    facts = {
        "config": config[1] if config else "", "field": complaint.field, "problem": problem.removeprefix("Value error, "),
        "value": value.strip("'\"") if sayable else "",
    }
    text = ": ".join(part for part in (complaint.headline, complaint.field, problem) if part)
    shown = f" (it is {value})" if sayable else ""
    return Whole(complaint.line, text + shown, tuple((name, fact) for name, fact in facts.items() if fact))
