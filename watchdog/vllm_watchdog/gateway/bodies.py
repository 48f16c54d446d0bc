"""A request's body as JSON, read with suspicion: what the engine would read in another way, or choke on, is refused.  Pure.

Never more memory than a small multiple of the body that it is given; who calls sees to the rest (`counting` has a limit).
"""

from __future__ import annotations

import json
from typing import Any

PARTS = 1_000_000       # lists and objects, or their brackets in texts: a prompt of 100 MB of program text has as many


class UnreadableError(Exception):
    """One sentence: what is wrong, and where; never text of the request."""


def read(body: bytes) -> dict[str, Any]:
    """Raises UnreadableError."""
    if body.count(b"[") + body.count(b"{") > PARTS:
        raise UnreadableError("The body holds too many lists and objects")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"The body is not UTF-8: byte {error.start} can't be read") from None
    try:
        value = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise UnreadableError(f"The body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise UnreadableError("The body is nested too deeply") from None
    except MemoryError:
        raise UnreadableError("The body needs more memory to be read than this gateway gives it") from None
    except ValueError:      # int() of more than 4,300 digits
        raise UnreadableError("The body holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise UnreadableError("The body is no JSON object")
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise UnreadableError("The body holds an object with the same key twice")
    return value


def _constant(_: str) -> float:
    raise UnreadableError("The body holds NaN or Infinity, which is no JSON")


def whole_number(value: object, name: str) -> int | None:
    """A field that may be missing."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnreadableError(f"{name}: expected a whole number, not below 0")
    return value
