"""A validation error of vLLM's settings: pydantic tells it over several lines, and the first one says the least.

    1 validation error for CacheConfig                                          the headline, a row of the catalogue
    gpu_memory_utilization                                                      the field; none where the whole is wrong
      Input should be less than or equal to 1 [type=…, input_value=80.0, …]     what is wrong with it

Several errors follow one another, each with a third line that points to pydantic's pages.  Pure: one record at a time, a
few lines for each of at most `ERRORS` errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.details import Details
from vllm_watchdog.core.records import Record

HEADLINE = " validation error"
ERRORS = 4          # of one headline that are read
VALUE_LIMIT = 60    # characters of a value that are shown; a longer one is a whole structure

_HEADLINE = re.compile(r"(\d{1,4}) validation errors? for (\w+)")
_FIELD = re.compile(r"[A-Za-z_][\w.\[\]-]{0,100}")
_WRONG = re.compile(r" {2}(\S.*?)(?: \[type=\w+, input_value=(.*), input_type=\w+\])?", re.DOTALL)
_SECRET = re.compile("(?:key|token|secret|password)$", re.IGNORECASE)
_POINTER = "    For further information visit "


@dataclass(frozen=True, slots=True)
class Complaint:
    """A headline that waits for its next lines, until line `until`; `line` counts as in findings."""

    site: tuple[str, int, str, int]
    line: int
    until: int
    headline: str
    field: str = ""
    told: tuple[str, ...] = ()      # of the errors so far
    details: Details = ()           # of the first one, and `also`: the others


    @property
    def text(self) -> str:
        """The headline and its errors, on one line."""
        return f"{self.headline}: {'; '.join(self.told)}"


def lines_after(text: str) -> int:
    """How many lines may belong to a headline: three an error, and one of another process between; 0: it is none."""
    found = _HEADLINE.search(text)
    return 3 * min(int(found[1]), ERRORS) + 1 if found else 0


def begun(record: Record, line: int) -> Complaint | None:
    """None where the record is no headline."""
    found = _HEADLINE.search(record.message)
    if not found:
        return None
    until = line + lines_after(record.message)
    return Complaint(record.site, line, until, record.message, details=(("config", found[2]),))


def heard(complaint: Complaint, record: Record, line: int) -> Complaint | None:
    """What the next record makes of it (one more error `told`, or none yet); None once nothing more belongs to it."""
    if line > complaint.until:
        return None
    if record.site != complaint.site or record.message.startswith(_POINTER):
        return complaint
    if (wrong := _WRONG.fullmatch(record.message)) and (complaint.field or not complaint.told):
        return _told(complaint, wrong[1], wrong[2] or "")
    if not complaint.field and _FIELD.fullmatch(record.message):
        return replace(complaint, field=record.message)
    return None


def _told(complaint: Complaint, problem: str, value: str) -> Complaint:
    """A value is told only of a field whose name sounds like no secret."""
    sayable = complaint.field and 0 < len(value) <= VALUE_LIMIT and not _SECRET.search(complaint.field)
    text = f"{complaint.field}: {problem}" if complaint.field else problem
    told = (*complaint.told, text + (f" (it is {value})" if sayable else ""))
    if complaint.told:
        facts = {"also": "; ".join(told[1:])}
    else:
        facts = {"field": complaint.field, "problem": problem.removeprefix("Value error, "),
                 "value": value.strip("'\"") if sayable else ""}
    details = dict(complaint.details) | {name: fact for name, fact in facts.items() if fact}
    return replace(complaint, field="", told=told, details=tuple(details.items()))
