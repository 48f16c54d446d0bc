"""Rows of the history as plain text for a terminal.  Pure: text in, text out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

from vllm_watchdog.core import journal_phrases, lessons, story
from vllm_watchdog.core import phrases as p
from vllm_watchdog.core.catalog import CATALOG, Text
from vllm_watchdog.core.incidents import Incident, Urgency
from vllm_watchdog.core.units import duration, utc
from vllm_watchdog.tell import page

LABEL = 14          # columns of the widest label of a fact
STEP = 11           # ... of a word for a step
PROOF = 240         # characters of a proving line; the page has all of it


def incidents(rows: Sequence[dict[str, Any]], language: str = "en") -> str:
    """The history, newest first."""
    if not rows:
        return "no incidents"
    return "\n".join(table(("WHEN", "LASTED", "STATE", "ENGINE", "WHAT", "ID"), (
        (_when(row["wall_opened"]), _lasted(row), _state(row), row["engine"], _title(row["class"], language), row["id"])
        for row in rows
    )))


def _state(row: dict[str, Any]) -> str:
    if row["class"] == "snapshot":
        return "-"
    if row["wall_resolved"] is not None:
        return "resolved"
    return "A HUMAN IS NEEDED" if row["urgency"] == Urgency.PAGE else "open"


def _title(class_: str, language: str) -> str:
    return CATALOG[class_].title.of(language) if class_ in CATALOG else class_


def incident(told: Incident, folder: Path, languages: Sequence[str] = ("en",)) -> str:
    """One incident as its page tells it, in each language: what, how it stands, what to do; the timeline at the end."""
    lines = [line for language in languages for line in (*_part(told, folder, language), "")]
    lines += [p.HEADINGS["timeline"].of(languages[0])]
    lines += [f"  {_clock(story.wall(told, at))}  {_padded(what.of(languages[0]), STEP)} {text.of(languages[0])}"
              for at, what, text in story.told(told)]
    return "\n".join(lines)


def _part(told: Incident, folder: Path, language: str) -> list[str]:
    def said(text: Text) -> str:
        return text.of(language)

    lines = [said(story.heading(told)), said(story.state(told)), ""]
    if failures := lessons.failures(told):
        lines += [said(p.LABELS["failures"])]
        lines += [f"  {each.number}. {said(text)}" for each, text in zip(told.failures, failures, strict=True)] + [""]
    if todo := lessons.lessons(told):
        lines += [said(p.HEADINGS["todo"])]
        number = count(1)
        for lesson in todo:
            lines += [f"  {said(lesson.head)}:"] if failures else []
            lines += [f"  {next(number)}. {said(text)}" for text in lesson.lines]
        lines += [""]
    lines += [f"  {_padded(said(label), LABEL)} {text}" for label, text in page.facts(told, language)]
    if proof := lessons.proof(told, language):
        lines += ["", said(p.HEADINGS["proof"]), *(f"  {line[:PROOF]}" for line in proof)]
    if told.flights:
        lines += ["", said(p.HEADINGS["flight"]), *(f"  {said(story.flight_of(each))}" for each in told.flights)]
    if rows := story.memory(told):
        cells = [[cell.of(language) for cell in row] for row in rows]
        lines += ["", said(p.HEADINGS["memory"]), *(f"  {line}" for line in table(cells[0], cells[1:]))]
    if steps := story.actions(told):
        lines += ["", said(p.HEADINGS["done"]), *(f"  {story.clock(told, step.at)} {said(step.text)}" for step in steps)]
    return [*lines, "", f"{said(p.HEADINGS['files'])}: {folder / told.id}"]


def event(line: dict[str, Any], language: str = "en") -> str:
    """A line of the journal in words: its time, then a sentence; its fields where no sentence is known."""
    words = journal_phrases.worded(line["say"], line)
    if words is not None:
        return f"{line.get('wall', '')} {words.of(language)}".lstrip()
    return worded(line)


def worded(line: Mapping[str, Any]) -> str:
    """A journal line with its fields in order: `2026-11-29T14:41:57.123Z engine.phase engine=primary#2 now=serving`."""
    left_out = ("wall", "at", "say", "decided")
    fields = " ".join(f"{key}={_quoted(value)}" for key, value in line.items()
                      if key not in left_out and not key.endswith("_zh"))
    return f"{line.get('wall', '')} {line['say']} {fields}".strip()


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not set(text) & {" ", "=", '"'}
    return text if plain else json.dumps(text, ensure_ascii=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    all_rows = [head, *rows]
    widths = [max(_width(row[column]) for row in all_rows) for column in range(len(head))]
    return ["  ".join(_padded(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in all_rows]


def _width(text: str) -> int:
    """Columns of a terminal: a Chinese character takes two."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def _when(wall: float | None) -> str:
    return "-" if wall is None else utc(wall)


def _clock(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%H:%M:%S.%f")[:-3]


def _lasted(row: dict[str, Any]) -> str:
    if row["wall_resolved"] is None:
        return "open"
    return duration(row["wall_resolved"] - row["wall_opened"])
