"""A request as the client sent it: head, body while somebody may need it, what is known of it, the phases of its way.  Does
nothing."""

from __future__ import annotations

from enum import StrEnum, auto
from hashlib import blake2b

from vllm_watchdog.gateway.ask import Ask, ask_of
from vllm_watchdog.gateway.heads import RequestHead
from vllm_watchdog.gateway.quarantine import tokens_of
from vllm_watchdog.gateway.routes import Kind


class Phase(StrEnum):
    READING = auto()
    SIZING = auto()
    WAITING = auto()
    SENT = auto()
    DOUBTED = auto()
    BEGUN = auto()
    DONE = auto()


class Request:
    """`body` None: it is streamed, or no longer needed.  `size`: its bytes.  `at`: when its head was here.  `deaths`: of
    engines that it was at; `alone`: it goes only where no other request is; `repeatable`: it may be sent twice."""

    __slots__ = ("_ask", "_digest", "alone", "at", "body", "deaths", "head", "id", "kind", "repeatable", "size")

    def __init__(self, head: RequestHead, kind: Kind, id_: int, at: float) -> None:
        self.head, self.kind, self.id, self.at = head, kind, id_, at
        self.body: bytes | None = None
        self.size, self.deaths, self.alone = 0, 0, False
        self.repeatable = kind is not Kind.OTHER and not head.no_replay
        self._ask: Ask | None = None
        self._digest = ""

    @property
    def ask(self) -> Ask | None:
        """What a generation wants; looked for when somebody has to know, for that takes longer than all else here."""
        if self._ask is None and self.kind is Kind.GENERATION:
            self._ask = ask_of(self.head, self.body or b"")
        return self._ask

    @ask.setter
    def ask(self, counted: Ask) -> None:
        self._ask = counted

    @property
    def asked(self) -> bool:
        """Somebody had to know."""
        return self._ask is not None

    @property
    def tokens(self) -> int:
        """Of its prompt: as counted, else by an estimate."""
        counted = self._ask.tokens if self._ask is not None else None
        return tokens_of(self.size) if counted is None else counted

    @property
    def digest(self) -> str:
        self.remember_digest()
        return self._digest

    def remember_digest(self) -> None:
        """Of the body, before it is dropped."""
        if not self._digest and self.body is not None:
            self._digest = blake2b(self.body, digest_size=16).hexdigest()
