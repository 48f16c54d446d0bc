"""`llm-watchdog explain`: which rule a request meets, which service gets it, and how long its prompt may be there.

From the configuration, by the gateway's own code; where the daemon answers, with who serves now, else as if all did.
Blocks on reading a file, on the daemon for at most `ask_s`, and, where no tokenizer is here, on the engine that serves, for
as long as the gateway would wait for its word.
"""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from vllm_watchdog.app.rules_table import backed, rows
from vllm_watchdog.config import Settings
from vllm_watchdog.config_rules import models_by_service
from vllm_watchdog.core.units import MIB
from vllm_watchdog.gateway import counting
from vllm_watchdog.gateway.ask import Ask, ask_of
from vllm_watchdog.gateway.budget import Budget, Engine, Verdict, budget
from vllm_watchdog.gateway.heads import BadHeadError, RequestHead, header, parse_request
from vllm_watchdog.gateway.learn import tokenized
from vllm_watchdog.gateway.quarantine import tokens_of
from vllm_watchdog.gateway.routes import GENERATION_PATHS, READ_PATHS, Kind, Route, Service, Target, kind_of
from vllm_watchdog.gateway.rules import Choice, choose
from vllm_watchdog.gateway_rules import WhenDown, applicable, key_of
from vllm_watchdog.prompt_plan import told
from vllm_watchdog.tell.client import Unreachable, call

TAKEN, REFUSED, BAD = 0, 1, 2
ask_s = 2.0
POSTED = GENERATION_PATHS | READ_PATHS
UNKNOWN = 1 << 62       # tokens of a prompt of which nothing is known


class BadRequestError(Exception):
    """What was given is no request: what, and what was expected."""


def explain(settings: Settings, options: Namespace, out: TextIO) -> int:
    """Prints to `out`; the exit status.  Raises BadRequestError."""
    explained = Explained(settings, options)
    print(*explained.lines(), sep="\n", file=out)
    return explained.status


class Explained:
    """One request: from the options to what becomes of it."""

    def __init__(self, settings: Settings, options: Namespace) -> None:
        self._settings, self._models = settings, models_by_service(settings)
        launches = self._launches = settings.launches()
        services = tuple(Service(name, models, prompt=launches[name].prompt) for name, models in self._models.items())
        self._route = Route(0, services, settings.rules())
        self._now, self._serving = _state(settings)
        self._head = _head(options)
        self._bad = ""
        self._ask = self._asked(options)
        choice = choose(self._route, self._ask, self._header, self._up, self._room)
        if choice is None:
            raise BadRequestError("a rule depends on the length of the prompt, expected --tokens N or --file BODY.json")
        self._choice: Choice = choice
        self.status = REFUSED if choice.refused or self._bad or self._limit()[1] else TAKEN

    def _asked(self, options: Namespace) -> Ask:
        body = b"" if options.file is None else _body(options.file, self._settings.gateway.max_body_mib * MIB)
        ask = ask_of(self._head, body)
        ask = replace(ask, model=options.model or ask.model, key=self._key(options.api_key) or ask.key)
        if kind_of(self._head.method, self._head.path) is not Kind.GENERATION:
            return replace(ask, bound=0, tokens=0, exact=True)
        if options.file is None:
            ask = replace(ask, bound=UNKNOWN)
            return ask if options.tokens is None else replace(ask, tokens=options.tokens, longest=options.tokens, exact=True)
        if not _is_object(body):
            raise BadRequestError(f"{options.file}: expected a JSON object, the body of a request to {ask.path}")
        return self._counted(ask, body)

    def _key(self, name: str | None) -> str:
        keys = self._settings.gateway.keys
        if name is not None and name not in keys:
            raise BadRequestError(f"--api-key {name}: expected a name of gateway.keys, "
                                  f"{'one of ' + ', '.join(keys) if keys else 'of which there is none'}")
        return key_of(keys[name].get_secret_value().encode()) if name is not None else ""

    def _counted(self, ask: Ask, body: bytes) -> Ask:
        """As the gateway does it: by the model's tokenizer, by the engine, by an estimate."""
        usual = self._route.pick(ask.model)
        said: dict[str, Any] = {"lacks": ""}
        if usual is not None:
            said, _ = counting.answer({"plan": told(usual.prompt), "path": ask.path, "enough": None, "cut": None}, body)
        if "bad" in said:
            self._bad = str(said["bad"])
        if "tokens" not in said:
            counted = self._by_engine(usual, body)
            tokens = tokens_of(len(body)) if counted is None else counted
            said = {"tokens": tokens, "longest": tokens, "exact": counted is not None, "max_tokens": None}
        return replace(ask, **{key: said[key] for key in ("tokens", "longest", "exact", "max_tokens")})

    def _by_engine(self, service: Service | None, body: bytes) -> int | None:
        """By the /tokenize of the one that serves; None: nobody does, or it does not say."""
        name = self._serving.get(service.name) if service is not None else None
        if name is None or name not in self._launches:
            return None
        launch = self._launches[name]
        shown = f"Bearer {launch.api_key.get_secret_value()}".encode() if launch.api_key else b""
        host = launch.url.removeprefix("http://").rpartition(":")[0].strip("[]")
        return asyncio.run(tokenized(Target(name, 0, host, launch.port), body, shown))

    def _header(self, name: str) -> str | None:
        value = header(self._head, name.encode())
        return None if value is None else value.decode("latin-1")

    def _up(self, service: Service) -> bool:
        return self._serving.get(service.name, "") is not None      # as if all did, where that is not known

    def _room(self, service: Service) -> bool:
        most = _allowed(service).longest
        return most is None or self._ask.tokens is None or self._ask.tokens <= most

    # -- in words

    def lines(self) -> Iterator[str]:
        ask = self._ask
        words = [f"{self._head.method.decode()} {ask.path}",
                 f"model {ask.model}" if ask.model is not None else "no model named"]
        if ask.tokens is not None:
            words.append(f"{ask.tokens} prompt tokens" if ask.exact else f"some {ask.tokens} prompt tokens by its size")
        yield ", ".join(words)
        if self._bad:
            yield f"the gateway refuses it where its length matters: {self._bad}"
        yield from self._rules()
        service = self._choice.service
        if service is None:
            return
        yield f"service {service.name}: {self._why(service)}"
        yield f"  engines: {backed(self._settings, service.name)}"
        yield f"  limit: {self._limit()[0]}"
        yield f"  now: {self._now.get(service.name, 'the daemon does not know it: reload or restart it')}" \
            if self._now else "  now: the daemon does not answer, so this is as if every engine served"

    def _rules(self) -> Iterator[str]:
        known, decided = self._route.models, self._choice.rule
        for number, (row, rule) in enumerate(zip(rows(self._settings), self._route.rules, strict=True), 1):
            service = self._route.service(rule.service)
            missed = rule.misses(self._ask, self._header)
            if service is None or not applicable(rule, self._ask.model, service.models, known):
                said = f"no: {rule.service} does not serve {self._ask.model}"
            elif missed:
                said = f"no: {missed}"
            elif number == decided:
                said = "this one"
            else:
                said = "matches" if missed == "" else "-"
            yield f"{row}   {said}"

    def _why(self, service: Service) -> str:
        number = self._choice.rule
        if not number:
            served = self._ask.model is not None and self._ask.model in service.models
            return f"no rule matches, it serves {self._ask.model}" if served else "no rule matches, it is the first"
        rule = self._route.rules[number - 1]
        if service.name != rule.service:
            return f"rule {number} matches, and spills while {rule.service} is down"
        if self._up(service):
            return f"rule {number} matches"
        if self._choice.refused:
            return f"rule {number} matches; it is down, so the request gets 503 at once"
        nowhere = ", and no other engine takes it" if rule.when_down is WhenDown.SPILL else ""
        held = f"so the request waits, for {self._settings.gateway.hold_s:g} s at most"
        return f"rule {number} matches; it is down{nowhere}, {held}"

    def _limit(self) -> tuple[str, bool]:
        """In words; whether the prompt is longer than that."""
        ask, service = self._ask, self._choice.service
        allowed = _allowed(service) if service is not None else Budget()
        if service is None or allowed.longest is None:
            return "the engine's own, which the configuration does not say", False
        said = f"{allowed.longest} prompt tokens"
        if ask.tokens is None:
            return said, False
        verdict = allowed.verdict(ask, service.prompt.over)
        if verdict is Verdict.FITS:
            return f"{said}, {allowed.longest - ask.longest} more than this has", False
        fate = "cut" if verdict is Verdict.CUT else "refused"
        return f"{said}, {ask.longest - allowed.longest} fewer than this has, so it is {fate}", verdict is Verdict.TOO_LONG


def _allowed(service: Service) -> Budget:
    """As far as the configuration says."""
    return budget(service.prompt, Engine())


def _head(options: Namespace) -> RequestHead:
    """The request, as a client would write it: with a body where one is given, or where vLLM takes nothing else.

    Raises BadRequestError.
    """
    posted = options.file is not None or options.path in POSTED
    lines = [f"{'POST' if posted else 'GET'} {options.path} HTTP/1.1", "Host: explain", *options.header]
    if any(not line.isprintable() or not line.isascii() for line in lines):
        raise BadRequestError("a path or a header holds a line break or what is not ASCII, expected one line")
    if not options.path.startswith("/"):
        raise BadRequestError(f"--path {options.path}: expected it to begin with /")
    if any(":" not in line for line in options.header):     # what it holds may be a secret
        raise BadRequestError("--header: without a colon, expected 'Name: value'")
    try:
        return parse_request(("\r\n".join(lines) + "\r\n\r\n").encode())
    except BadHeadError as error:
        raise BadRequestError(f"--path or --header: {error}") from None


def _body(path: Path, limit: int) -> bytes:
    """Raises BadRequestError."""
    try:
        with path.open("rb") as file:
            body = file.read(limit + 1)
    except OSError as error:
        raise BadRequestError(f"{path}: {error.strerror}, expected the body of a request") from None
    if len(body) > limit:
        raise BadRequestError(f"{path}: more than gateway.max_body_mib, which the gateway refuses with 413")
    return body


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def _state(settings: Settings) -> tuple[dict[str, str], dict[str, str | None]]:
    """Each service in words, and who serves it (None: nobody); nothing where the daemon does not answer."""
    try:
        services = call(settings.daemon.socket, {"verb": "status"}, ask_s)["services"]
    except (Unreachable, KeyError):
        return {}, {}
    words = {}
    for service in services:
        lowered = service.get("lowered")
        said = f"{service['serving']} serves" if service["serving"] else f"down, {service['wanted']} is wanted"
        words[service["name"]] = said + (f", {lowered['to']} requests at a time" if lowered else "")
    return words, {service["name"]: service["serving"] for service in services}
