"""Rows of the history as plain text for a terminal.  Pure: text in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def incidents(rows: Sequence[dict[str, Any]]) -> str:
    """The history, newest first."""
    if not rows:
        return "no incidents"
    return "\n".join(table(("OPENED", "LASTED", "URGENCY", "ENGINE", "CAUSE", "ID"), (
        (_when(row["wall_opened"]), _lasted(row), row["urgency"], row["engine"], row["class"], row["id"])
        for row in rows
    )))


def incident(row: dict[str, Any], folder: Path) -> str:
    """One incident: what, when, the lines that prove it, what was done, where the evidence lies."""
    whole = row["incident"]
    lines = [
        row["id"],
        f"  cause     {row['class']}: {whole['text']}",
        f"  engine    {row['engine']}, generation {whole['generation']}",
        f"  opened    {_when(row['wall_opened'])}",
        f"  resolved  {_when(row['wall_resolved'])} ({_lasted(row)})",
    ]
    offset = whole["wall_opened"] - whole["opened_at"]
    lines += ["", "timeline"]
    lines += [f"  {_clock(entry['at'] + offset)}  {entry['what']:<9} {entry['text']}" for entry in whole["timeline"]]
    if whole["findings"]:
        lines += ["", "log lines that prove it", *(f"  {finding['text']}" for finding in whole["findings"])]
    return "\n".join([*lines, "", f"evidence  {folder / row['id']}"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    all_rows = [head, *rows]
    widths = [max(len(row[column]) for row in all_rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in all_rows]


def _when(wall: float | None) -> str:
    return "-" if wall is None else datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _clock(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%H:%M:%S.%f")[:-3]


def _lasted(row: dict[str, Any]) -> str:
    if row["wall_resolved"] is None:
        return "open"
    seconds = row["wall_resolved"] - row["wall_opened"]
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
