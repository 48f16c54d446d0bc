"""Sizes in bytes, spans in seconds and instants in epoch seconds, as text; every instant is told in UTC."""

from __future__ import annotations

from datetime import UTC, datetime

MIB, GIB = 1 << 20, 1 << 30
DAY_S = 86_400


def gib(size: float) -> str:
    """A size for people: GiB, and MiB below one."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def duration(seconds: float) -> str:
    """A span that was measured, for people."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def outlook(seconds: float) -> str:
    """A span that is still to come, and only estimated."""
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} days"


def iso(wall: float) -> str:
    """For machines: `2026-11-29T14:41:57.123Z`."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc(wall: float) -> str:
    """For people: `2026-11-29 14:41:57Z`."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def time_of_day(wall: float) -> str:
    """For people who know the day: `14:41:57Z`."""
    return datetime.fromtimestamp(wall, UTC).strftime("%H:%M:%SZ")


def stamp(wall: float) -> str:
    """For names of files: `20261129T144157Z`."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y%m%dT%H%M%SZ")
