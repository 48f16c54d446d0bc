"""The endpoints, as a table of functions: each answers one request on its connection, in the connection's own thread.

`/health` asks only whether the engine's death was noticed; what produces tokens goes through EngineCore and waits for
it as long as the client stays (a hung engine hangs it). Nothing here ends the process; a noticed death is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from vllm_watchdog.sim import completions, logs
from vllm_watchdog.sim.client import DEAD, EngineClient
from vllm_watchdog.sim.completions import RefusedError
from vllm_watchdog.sim.faults import RUNTIME_FAULTS
from vllm_watchdog.sim.flags import VERSION, Options
from vllm_watchdog.sim.metrics import Metrics
from vllm_watchdog.sim.wire import Connection, Request, dumps

TEXT = "text/plain; version=0.0.4; charset=utf-8"
UTILITY_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Context:
    """What the endpoints work with."""

    options: Options
    client: EngineClient
    metrics: Metrics
    log: logs.Log
    noticed: Callable[[], None]  # a request has met the dead engine: the server ends
    fault: Callable[[dict[str, Any]], None]  # a fault of the API server itself


def answer(context: Context, connection: Connection, request: Request) -> None:
    """Answers one request. Raises wire.ClientGoneError when the client leaves."""
    endpoint = ENDPOINTS.get((request.method, request.path))
    development = request.path in DEVELOPMENT and not context.options.dev_mode
    try:
        if endpoint is None or development:
            known = any(path == request.path for _, path in ENDPOINTS) and not development
            status = 405 if known else 404
            _json(context, connection, request, status, {"detail": HTTPStatus(status).phrase})
        elif not _authorized(context, request):
            _json(context, connection, request, 401, {"error": "Unauthorized"})
        else:
            endpoint(context, connection, request)
    except RefusedError as refused:
        if refused.status == 500:
            _engine_error(context, refused.request_id)
        _json(context, connection, request, refused.status, refused.body())


def _authorized(context: Context, request: Request) -> bool:
    keys = context.options.api_keys
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    return not keys or not request.path.startswith("/v1") or given in keys


def _engine_error(context: Context, request_id: str) -> None:
    if context.client.closing:
        return  # the engine ended because we stop it
    headline = f"Engine Exception caught. Request id: {request_id}"
    context.log.failure("vllm_error.py:54", headline, logs.REQUEST_FRAMES, logs.ENGINE_DEAD)
    context.noticed()


def _json(context: Context, connection: Connection, request: Request, status: int, value: Any) -> None:
    _body(context, connection, request, status, dumps(value))


def _body(
    context: Context, connection: Connection, request: Request, status: int, body: bytes, kind: str = "application/json"
) -> None:
    connection.respond(request, status, body, kind)
    access(context, connection, request, status)


def access(context: Context, connection: Connection, request: Request, status: int) -> None:
    """uvicorn's access line."""
    if context.options.log_access:
        logs.access(connection.client, f"{request.method} {request.target} {request.version}", status)


def _health(context: Context, connection: Connection, request: Request) -> None:
    dead = context.client.dead
    _body(context, connection, request, 503 if dead else 200, b"")
    if dead:
        context.noticed()


def _metrics(context: Context, connection: Connection, request: Request) -> None:
    _body(context, connection, request, 200, context.metrics.render().encode(), TEXT)


def _version(context: Context, connection: Connection, request: Request) -> None:
    _json(context, connection, request, 200, {"version": VERSION})


def _load(context: Context, connection: Connection, request: Request) -> None:
    _json(context, connection, request, 200, {"server_load": 0})


def _models(context: Context, connection: Connection, request: Request) -> None:
    options = context.options
    cards = [
        {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": options.model,
            "parent": None,
            "max_model_len": options.max_model_len,
        }
        for name in options.served_names
    ]
    _json(context, connection, request, 200, {"object": "list", "data": cards})


def _tokenize(context: Context, connection: Connection, request: Request) -> None:
    asked = completions.read_json(request.body)
    count = completions.prompt_tokens(asked)
    value = {"count": count, "max_model_len": context.options.max_model_len, "tokens": list(range(count))}
    _json(context, connection, request, 200, value)


def _complete(context: Context, connection: Connection, request: Request) -> None:
    chat = request.path == "/v1/chat/completions"
    asked = completions.read_json(request.body)
    job = completions.start(context.options, context.client, asked, chat)
    if not asked.get("stream"):
        _json(context, connection, request, 200, completions.whole(job, connection.gone))
        return
    whole_answer = completions.stream(job, connection, request, lambda: access(context, connection, request, 200))
    if not whole_answer and not context.client.closing:
        headline = "Error in completion stream generator."
        context.log.failure("serving.py:500", headline, logs.REQUEST_FRAMES, logs.ENGINE_DEAD)
        context.noticed()


def _is_sleeping(context: Context, connection: Connection, request: Request) -> None:
    _json(context, connection, request, 200, {"is_sleeping": bool(_utility(context, connection, "is_sleeping"))})


def _sleep(context: Context, connection: Connection, request: Request) -> None:
    level = int(request.query.get("level", "1")) if request.query.get("level", "1").isdigit() else 1
    if not context.options.sleep_mode:
        raise RefusedError(400, "Sleep mode is not enabled.")
    _utility(context, connection, "sleep", level, request.query.get("mode", "abort"))
    context.metrics.sleeping(level)
    _body(context, connection, request, 200, b"")


def _wake_up(context: Context, connection: Connection, request: Request) -> None:
    context.log.info("api_router.py:50", "wake up the engine with tags: None")
    _utility(context, connection, "wake_up")
    context.metrics.sleeping(0)
    _body(context, connection, request, 200, b"")


def _utility(context: Context, connection: Connection, name: str, level: int = 0, mode: str = "") -> Any:
    number = context.client.utility(name, level, mode)
    try:
        while (value := context.client.take(number, UTILITY_POLL_S)) is None:
            if connection.gone():
                raise RefusedError(499, "client has gone")
    finally:
        context.client.close(number, abort=False)
    if value == DEAD:
        raise RefusedError(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
    return value


def _fault(context: Context, connection: Connection, request: Request) -> None:
    asked = completions.read_json(request.body)
    name = str(asked.get("name"))
    if not connection.client.startswith(("127.", "[::1]", "::1")):
        raise RefusedError(403, "faults are switched from loopback only")
    if name not in RUNTIME_FAULTS:
        raise RefusedError(400, f"name: unknown fault {name!r}, expected one of {', '.join(RUNTIME_FAULTS)}")
    context.fault({**asked, "name": name})
    _json(context, connection, request, 200, {"fault": name})


Endpoint = Callable[[Context, Connection, Request], None]

ENDPOINTS: dict[tuple[str, str], Endpoint] = {
    ("GET", "/health"): _health,
    ("GET", "/ping"): _health,
    ("POST", "/ping"): _health,
    ("GET", "/metrics"): _metrics,
    ("GET", "/version"): _version,
    ("GET", "/load"): _load,
    ("GET", "/v1/models"): _models,
    ("POST", "/tokenize"): _tokenize,
    ("POST", "/v1/completions"): _complete,
    ("POST", "/v1/chat/completions"): _complete,
    ("GET", "/is_sleeping"): _is_sleeping,
    ("POST", "/sleep"): _sleep,
    ("POST", "/wake_up"): _wake_up,
    ("POST", "/sim/fault"): _fault,
}
DEVELOPMENT = frozenset({"/is_sleeping", "/sleep", "/wake_up"})
