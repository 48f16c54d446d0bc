"""Who may ask, and how an error looks: the checks that stand in front of every handler.

- A `Host` that is a name of somebody else's means that a page of theirs was pointed at our address (DNS rebinding): refused.
- There are no cookies, so no other site can act in somebody's name; whatever changes something needs the token, in a header
  that a foreign page can't send without asking us first, and we never say yes.
- Every error is problem+json (RFC 9457).
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import traceback
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Middleware

from vllm_watchdog.say import Say

BODY_BYTES = 16 << 10
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):  # noqa: N818 - it reads as what it says
    """An answer that is an error: its status, and one sentence that says what was expected."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers or {}


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> web.Response:
    document = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return web.Response(status=status, body=json.dumps(document, ensure_ascii=False).encode(), headers=headers,
                        content_type="application/problem+json")


def front(listen_host: str, say: Say) -> Middleware:
    """Errors as problems, the checks, and the headers that keep a browser narrow."""
    names = {"localhost", listen_host, os.uname().nodename.lower()}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _check_host(request, names)
            _check_origin(request)
            response = await handler(request)
        except Refused as refused:
            response = problem(refused.status, refused.detail, refused.headers)
        except web.HTTPException as error:
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            response = problem(error.status, _reason(error), allow)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:      # a bug here must cost one answer, not the daemon
            say("web.failed", path=request.path, why=type(error).__name__)
            traceback.print_exc()
            response = problem(500, "a bug in the watchdog's page; its log has the traceback")
        if not response.prepared:
            response.headers.update(HEADERS | dict(response.headers))
        return response

    return check


def _reason(error: web.HTTPException) -> str:
    match error.status:
        case 404:
            return "nothing is at this address; /api/v1/openapi.json lists what there is"
        case 405:
            return "this address does not take that method"
        case 413:
            return f"expected at most {BODY_BYTES} bytes"
    return error.reason


def _check_host(request: web.Request, names: set[str]) -> None:
    """An address says that whoever asks knows where we are; a name must be one of ours."""
    name = request.headers.get("Host", "").lower()
    name = name.rpartition(":")[0] if name.rpartition(":")[2].isdecimal() else name
    if name in names:
        return
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        raise Refused(421, f"Host {name[:80]!r} is not this daemon, expected its address or localhost") from None


def _check_origin(request: web.Request) -> None:
    """Browsers say which page sends a request."""
    if request.method in ("GET", "HEAD"):
        return
    origin = request.headers.get("Origin")
    foreign = origin is not None and origin.partition("://")[2] != request.headers.get("Host")
    if foreign or request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise Refused(403, "sent by a page of another site")


def check_token(request: web.Request, token: str) -> None:
    """Raises Refused: 401 without a token, 403 with a wrong one or where none is configured."""
    if not token:
        raise Refused(403, "no daemon.token is configured: only the control socket takes this, by llm-watchdog's commands")
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise Refused(401, "expected Authorization: Bearer and daemon.token", {"WWW-Authenticate": "Bearer"})
    if not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise Refused(403, "the token is wrong")
