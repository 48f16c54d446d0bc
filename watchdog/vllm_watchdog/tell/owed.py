"""Can an alert that another daemon left be told?  It may be of an older version, or of a newer one.

What the channels read of a payload must be there, whatever version wrote it; what else there is does no harm.  Pure.
"""

from __future__ import annotations

from pydantic import BaseModel, Field, ValidationError

from vllm_watchdog.core.incidents import Urgency


class _Title(BaseModel):
    en: str
    zh: str


class _Payload(BaseModel):
    id: str
    kind: str
    incident: str
    service: str
    engine: str
    class_: str = Field(alias="class")
    urgency: Urgency
    title: _Title
    headline: str
    lines: list[tuple[str, str]]
    text: str
    host: str
    opened: str
    resolved: str | None
    folder: str


def untellable(payload: str) -> str:
    """Why its JSON can't be told; empty: it can."""
    try:
        _Payload.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"what another version of the watchdog wrote can't be read: {where or 'all of it'}: {first['msg']}"
    return ""
