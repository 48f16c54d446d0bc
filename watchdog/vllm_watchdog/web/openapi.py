"""The API's description, as OpenAPI 3.1: built from one small table, so that a test can hold it against the routes."""

from __future__ import annotations

from typing import Any

from vllm_watchdog import __version__

VERBS = ("failover", "failback", "pause", "resume", "snapshot")
Doc = dict[str, Any]

NUMBER, TEXT, WHOLE, OBJECT = {"type": "number"}, {"type": "string"}, {"type": "integer"}, {"type": "object"}
NULLABLE_TEXT, NULLABLE_NUMBER = {"type": ["string", "null"]}, {"type": ["number", "null"]}


def _object(required: dict[str, Doc], more: dict[str, Doc] | None = None) -> Doc:
    return {"type": "object", "required": list(required), "properties": required | (more or {})}


def _list(items: Doc) -> Doc:
    return {"type": "array", "items": items}


INCIDENT_ROW = _object({"id": TEXT, "service": TEXT, "engine": TEXT, "class": TEXT, "urgency": TEXT, "wall_opened": NUMBER,
                        "wall_resolved": NULLABLE_NUMBER})
WORDS: Doc = {"type": ["object", "null"], "properties": {"en": TEXT, "zh": TEXT}}
SCHEMAS: dict[str, Doc] = {
    "Problem": _object({"type": TEXT, "title": TEXT, "status": WHOLE, "detail": TEXT}),
    "Answer": _object({"ok": {"const": True}, "text": TEXT}),
    "Wish": {"type": "object", "additionalProperties": False,
             "properties": {"engine": {"type": "string", "maxLength": 500}, "reason": {"type": "string", "maxLength": 500}}},
    "Status": _object(
        {"at": NUMBER, "health": {"enum": ["healthy", "degraded", "down"]}, "paused": {"type": "boolean"},
         "stopping": {"type": "boolean"},
         "services": _list(_object({"name": TEXT, "side": {"enum": ["primary", "backup"]}, "wanted": TEXT,
                                    "serving": NULLABLE_TEXT, "port": WHOLE})),
         "engines": _list(_object({"name": TEXT, "phase": TEXT, "generation": WHOLE, "pid": {"type": ["integer", "null"]},
                                   "port": WHOLE, "gpus": _list(WHOLE), "since": NUMBER, "ready": NULLABLE_NUMBER,
                                   "cause": TEXT,
                                   "why": TEXT, "why_zh": TEXT, "waits": NULLABLE_TEXT, "waits_zh": NULLABLE_TEXT,
                                   "growth": _list(OBJECT), "metrics": OBJECT, "tree": {"type": ["object", "null"]},
                                   "profile": OBJECT})),
         "gpus": {"description": "a list of cards, or {\"unknown\": why}", "type": ["array", "object"]},
         "host": OBJECT, "incidents": _list(OBJECT), "symptoms": _list(OBJECT), "alerts": _list(OBJECT), "totals": OBJECT,
         "gateway": {"description": "how busy it is; {\"unknown\": why}; null: none has told anything yet",
                     "type": ["object", "null"]},
         "daemon": OBJECT}),
    "Incidents": _object({"incidents": _list(INCIDENT_ROW)}),
    "Incident": INCIDENT_ROW | {"properties": INCIDENT_ROW["properties"] | {
        "incident": OBJECT, "title": WORDS, "cause": WORDS, "state": WORDS, "gap": WORDS, "advice": _list(OBJECT),
        "actions": _list(OBJECT), "timeline": _list(OBJECT)}},
    "Classes": _object({"classes": {"type": "object", "additionalProperties": _object(
        {"en": TEXT, "zh": TEXT, "advice": _list(WORDS)})}}),
    "Files": _object({"folder": TEXT, "files": _list(_object({"name": TEXT, "bytes": WHOLE}))}),
    "Samples": _object({"range": TEXT, "step_s": NUMBER, "series": {
        "type": "object", "description": "by subject (engine/NAME, gpu/INDEX): t in epoch seconds, and a column a figure",
        "additionalProperties": {"type": "object", "additionalProperties": _list(NULLABLE_NUMBER)}}}),
}


def _query(name: str, schema: Doc) -> Doc:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _in_path(name: str) -> Doc:
    schema = {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_.-]+$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _get(summary: str, answer: Doc, errors: tuple[int, ...] = (), parameters: tuple[Doc, ...] = (),
         secured: bool = False) -> Doc:
    operation = {"summary": summary, "parameters": list(parameters), "responses": {"200": answer} | _errors((421, *errors))}
    return {"get": operation | ({"security": [{"token": []}]} if secured else {})}


def _post(summary: str, parameters: tuple[Doc, ...] = ()) -> Doc:
    body = {"required": False, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Wish"}}}}
    return {"post": {
        "summary": summary, "parameters": list(parameters), "requestBody": body, "security": [{"token": []}],
        "responses": {"200": _of("Answer", "done, and what")} | _errors((400, 401, 403, 404, 408, 409, 413, 415, 421, 503))}}


def _of(schema: str, text: str) -> Doc:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}


def _plain(kind: str, text: str) -> Doc:
    return {"description": text, "content": {kind: {"schema": TEXT}}}


def _errors(statuses: tuple[int, ...]) -> Doc:
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {str(status): {"description": "what is wrong", "content": content} for status in sorted(set(statuses))}


def document() -> Doc:
    """All addresses but the page's own."""
    id_, name, v1 = _in_path("id"), _in_path("name"), "/api/v1"
    limit = _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 50})
    range_ = _query("range", {"enum": ["10m", "6h", "7d"], "default": "10m"})
    since = _query("since", {"type": "number", "minimum": 0, "exclusiveMaximum": 1e11, "default": 0})
    what = {"failover": "Let the backup serve", "failback": "Let the primary serve again",
            "pause": "Stop automatic actions, not watching", "resume": "Automatic actions again",
            "snapshot": "Write an evidence bundle now"}
    paths = {
        "/livez": _get("200 while the daemon's loop turns", _plain("text/plain", "it does"), (503,)),
        "/readyz": _get("200 while every service is served", _plain("text/plain", "it is"), (503,)),
        "/metrics": _get("Prometheus metrics; `engines=1` merges vLLM's own", _plain("text/plain", "or OpenMetrics"),
                         (400, 503), (_query("engines", {"enum": ["0", "1"], "default": "0"}),)),
        f"{v1}/openapi.json": _get("This document", {"description": "OpenAPI 3.1", "content": {"application/json": {}}}),
        f"{v1}/status": _get("Engines, services, cards, open incidents, alert channels", _of("Status", "the newest report")),
        f"{v1}/classes": _get("What the classes of failures are called, in English and Chinese", _of("Classes", "by class")),
        f"{v1}/incidents": _get("The history, newest first", _of("Incidents", "rows"), (400, 503), (limit,)),
        f"{v1}/incidents/{{id}}": _get("One incident", _of("Incident", "also in words"), (404, 503), (id_,)),
        f"{v1}/incidents/{{id}}/files": _get("Its evidence", _of("Files", "names"), (401, 403, 404, 503), (id_,), True),
        f"{v1}/incidents/{{id}}/files/{{name}}": _get(
            "One file of its evidence", _plain("text/plain", "its last 4 MiB"), (401, 403, 404, 503), (id_, name), True),
        f"{v1}/events": _get("Server-sent events: `report` when it changed, `said` for each journal line in words",
                             _plain("text/event-stream", "endless"), (503,)),
        f"{v1}/samples": _get("Figures for plots", _of("Samples", "in columns"), (400, 503), (range_, since)),
        f"{v1}/engines/{{engine}}/restart": _post("Stop and start an engine; its failures are forgiven",
                                                  (_in_path("engine"),)),
        **{f"{v1}/{verb}": _post(text) for verb, text in what.items()},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "llm-watchdog", "version": __version__,
                 "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
                 "description": "Read what the daemon knows; operate it with daemon.token.  Instants are epoch seconds."},
        "paths": paths,
        "components": {"schemas": SCHEMAS,
                       "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "daemon.token"}}},
    }
