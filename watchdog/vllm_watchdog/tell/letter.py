"""What is posted to a receiver, and what it answers: for those who write letters and need no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


@dataclass(frozen=True, slots=True)
class Request:
    """`url` and `headers` are secrets."""

    url: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """`status` is None when there was none, and `why` says what kept it away."""

    status: int | None
    why: str
    body: bytes = b""
    retry_after_s: float | None = None


def retry_after(value: str, wall: float) -> float | None:
    """RFC 9110 10.2.3: seconds, or a date."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - wall)
    except (ValueError, OverflowError):
        return None
