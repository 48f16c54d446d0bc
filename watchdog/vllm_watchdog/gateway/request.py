"""A request as the client sent it: head, body while somebody may need it, and what is known of it.  Does nothing."""

from __future__ import annotations

from hashlib import blake2b

from vllm_watchdog.gateway.ask import Ask
from vllm_watchdog.gateway.heads import RequestHead
from vllm_watchdog.gateway.routes import Kind


class Request:
    """`body` None: it is streamed, or no longer needed.  `size`: its bytes.  `ask`: a generation's.  `at`: when its head
    was here.  `deaths`: of engines that it was at; `alone`: it goes only where no other request is."""

    __slots__ = ("_digest", "alone", "ask", "at", "body", "deaths", "head", "id", "kind", "size")

    def __init__(self, head: RequestHead, kind: Kind, id_: int, at: float) -> None:
        self.head, self.kind, self.id, self.at = head, kind, id_, at
        self.body: bytes | None = None
        self.size, self.deaths, self.alone = 0, 0, False
        self.ask: Ask | None = None
        self._digest = ""

    @property
    def repeatable(self) -> bool:
        return self.kind is not Kind.OTHER and not self.head.no_replay

    @property
    def digest(self) -> str:
        self.remember_digest()
        return self._digest

    def remember_digest(self) -> None:
        """Of the body, before it is dropped."""
        if not self._digest and self.body is not None:
            self._digest = blake2b(self.body, digest_size=16).hexdigest()
