"""A request on its way in: its head, then its body: framed, held against the limit, kept if it is wanted whole.  Pure."""

from __future__ import annotations

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.errors import Refusal
from vllm_watchdog.gateway.framing import Framing, FramingError
from vllm_watchdog.gateway.heads import END, HEAD_LIMIT, BadHeadError, RequestHead, parse_request


def cut_head(buffer: bytes) -> tuple[RequestHead, bytes] | None:
    """The head, and what came after it; None: it isn't whole yet.  Raises BadHeadError."""
    at = buffer.find(END)
    if 0 <= at <= HEAD_LIMIT:
        return parse_request(buffer[: at + 4]), buffer[at + 4 :]
    if buffer and not 0x41 <= buffer[0] <= 0x5A:        # TLS, or noise
        raise BadHeadError(errors.BAD_REQUEST, "a method was expected")
    if len(buffer) > HEAD_LIMIT:
        raise BadHeadError(errors.HEAD_TOO_LARGE)
    return None


class BadBodyError(Exception):
    """The body is refused; `refusal` says how."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(refusal.message)


class Body:
    """At most `limit` bytes, and as many of framing as a head may have."""

    __slots__ = ("_flow", "_limit", "_parts", "_size")

    def __init__(self, flow: Framing, limit: int) -> None:
        self._flow, self._limit, self._size = flow, limit + HEAD_LIMIT, 0
        self._parts: list[bytes] = []

    def keep(self, data: bytes) -> int:
        """As Framing.feed; `whole` has what came.  Raises BadBodyError."""
        return self._feed(data, self._parts)

    def count(self, data: bytes) -> int:
        """As Framing.feed.  Raises BadBodyError."""
        return self._feed(data, None)

    def _feed(self, data: bytes, parts: list[bytes] | None) -> int:
        try:
            end = self._flow.feed(data, parts)
        except FramingError as error:
            raise BadBodyError(errors.BAD_REQUEST.because(str(error))) from None
        self._size += len(data)
        if self._size > self._limit:
            raise BadBodyError(errors.BODY_TOO_LARGE)
        return end

    def whole(self) -> bytes:
        return b"".join(self._parts)
