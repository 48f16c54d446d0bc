"""Sizes in bytes, and instants as text.  Every instant here is epoch seconds, and every text is UTC."""

from __future__ import annotations

from datetime import UTC, datetime

MIB, GIB = 1 << 20, 1 << 30
DAY_S = 86_400


def iso(wall: float) -> str:
    """For machines: `2026-11-29T14:41:57.123Z`."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc(wall: float) -> str:
    """For people: `2026-11-29 14:41:57Z`."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def stamp(wall: float) -> str:
    """For names of files: `20261129T144157Z`."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y%m%dT%H%M%SZ")
