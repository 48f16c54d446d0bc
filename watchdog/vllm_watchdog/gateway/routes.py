"""The route document, and where a request goes by it.  Pure.

The daemon writes the document; this module reads it strictly enough that nothing later needs to check, and ignores keys
that it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, TypeVar

from vllm_watchdog.gateway_rules import Rule, WhenDown
from vllm_watchdog.prompt_plan import PromptPlan, PromptPlanError, heard

TEXTS = ("model", "path", "header", "key", "key_name")      # of a rule
PARSE_LIMIT = 4 << 20       # of a body that has to be parsed for its model; a few milliseconds a megabyte
MODEL = re.compile(rb'"model"\s*:\s*"((?:[^"\\]|\\.){0,512})"')


T = TypeVar("T")


class RouteError(Exception):
    """The document is not a route: where, and what was expected."""


class Kind(StrEnum):
    """What may be done with a request."""

    GENERATION = auto()     # goes through the engine; safe to repeat, held, counted, a suspect when the engine dies
    READ = auto()           # safe to repeat and light
    OTHER = auto()          # unknown: sent once, or answered with an error


GENERATION_PATHS = frozenset({
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/audio/transcriptions",
    "/v1/audio/translations", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify",
    "/generate", "/inference/v1/generate", "/generative_scoring", "/invocations",
})
# Open in vLLM's dev mode, which a sleeping standby needs: they stop, empty or rewrite an engine.
DEVELOPER_PATHS = frozenset({
    "/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory", "/collective_rpc", "/reset_prefix_cache",
    "/reset_mm_cache", "/reset_encoder_cache", "/server_info", "/pause", "/resume", "/is_paused", "/update_weights",
    "/init_weight_transfer_engine",
})
READ_PATHS = frozenset({
    "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/completions/render", "/v1/chat/completions/render",
    "/ping",
})


@dataclass(frozen=True, slots=True)
class Target:
    """One life of one engine."""

    engine: str
    generation: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Service:
    """`serving` None: nobody does, `why` says why.  `planned`: the engine that served was stopped on purpose, so its end is
    no request's fault.  `max_concurrent`, `max_tokens` (of prompts): at once; None: the engine queues for itself.
    `preempted`: how many requests the engine that serves has preempted so far.
    `vram_free`: bytes, told where the prompt plan asks for it."""

    name: str
    models: tuple[str, ...] = ()
    serving: Target | None = None
    max_concurrent: int | None = None
    why: str = ""
    planned: bool = False
    prompt: PromptPlan = PromptPlan()
    max_tokens: int | None = None
    preempted: int | None = field(default=None, compare=False)
    vram_free: int | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """No service: the daemon has not said anything yet."""

    version: int = 0
    services: tuple[Service, ...] = ()
    rules: tuple[Rule, ...] = ()

    @property
    def models(self) -> frozenset[str]:
        return frozenset(model for service in self.services for model in service.models)

    def service(self, name: str) -> Service | None:
        return next((service for service in self.services if service.name == name), None)

    def pick(self, model: str | None) -> Service | None:
        """The service of that model, else the first."""
        named = (service for service in self.services if model in service.models)
        return next(named, self.services[0] if self.services else None)


def kind_of(method: bytes, path: str) -> Kind:
    if method in (b"GET", b"HEAD"):
        return Kind.READ
    if method == b"POST" and path in GENERATION_PATHS:
        return Kind.GENERATION
    return Kind.READ if method == b"POST" and path in READ_PATHS else Kind.OTHER


def model_of(body: bytes) -> str | None:
    """The request's `model`, found without parsing the prompt where there is one candidate; None: it names none.

    Inside a JSON string the quotes are escaped, so a prompt can't pretend to be the key.
    """
    once = body.count(b'"model"') == 1
    found: set[bytes] = {match[1]} if once and (match := MODEL.search(body)) else set(MODEL.findall(body))
    if len(found) == 1 and not any(b"\\" in only for only in found):
        return str(found.pop(), "utf-8", "replace")
    if not found or len(body) > PARSE_LIMIT:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    model = value.get("model") if isinstance(value, dict) else None
    return model if isinstance(model, str) else None


def parse_route(document: object) -> Route:
    """Raises RouteError."""
    whole = _typed(document, "route", dict)
    services = _typed(whole.get("services"), "services", list)
    names = [_service(f"services[{index}]", each) for index, each in enumerate(services)]
    if len({service.name for service in names}) != len(names):
        raise RouteError("services: expected different names")
    rules = tuple(_rule(f"rules[{index}]", each) for index, each in enumerate(_typed(whole.get("rules", []), "rules", list)))
    return Route(_typed(whole.get("version"), "version", int), tuple(names), rules)


def _rule(where: str, value: object) -> Rule:
    rule = _typed(value, where, dict)
    most = rule.get("tokens_max")
    texts = {key: _typed(rule[key], f"{where}.{key}", str) for key in TEXTS if key in rule}
    try:
        when_down = WhenDown(rule.get("when_down", ""))
    except ValueError:
        raise RouteError(f"{where}.when_down: expected one of {', '.join(WhenDown)}") from None
    return Rule(
        _typed(rule.get("service"), f"{where}.service", str), when_down,
        _typed(rule.get("tokens_min", 0), f"{where}.tokens_min", int),
        None if most is None else _typed(most, f"{where}.tokens_max", int), **texts,
    )


def _service(where: str, value: object) -> Service:
    service = _typed(value, where, dict)
    models = _typed(service.get("models", []), f"{where}.models", list)
    serving = service.get("serving")
    return Service(
        _typed(service.get("name"), f"{where}.name", str),
        tuple(_typed(model, f"{where}.models", str) for model in models),
        _target(f"{where}.serving", serving) if serving is not None else None,
        _limit(where, service, "max_concurrent"),
        _typed(service.get("why") or "", f"{where}.why", str),
        service.get("planned") is True,
        _prompt(f"{where}.prompt", service.get("prompt") or {}),
        _limit(where, service, "max_tokens"),
        _count(where, service, "preempted"),
        _typed(service["vram_free"], f"{where}.vram_free", int) if service.get("vram_free") is not None else None,
    )


def _count(where: str, service: Mapping[str, Any], key: str) -> int | None:
    count = service.get(key)
    return _typed(count, f"{where}.{key}", int) if count is not None else None


def _limit(where: str, service: Mapping[str, Any], key: str) -> int | None:
    limit = _count(where, service, key)
    return max(1, limit) if limit is not None else None


def _prompt(where: str, value: object) -> PromptPlan:
    try:
        return heard(_typed(value, where, dict))
    except PromptPlanError as error:
        raise RouteError(f"{where}.{error}") from None


def _target(where: str, value: object) -> Target:
    serving: Mapping[str, Any] = _typed(value, where, dict)
    port = _typed(serving.get("port"), f"{where}.port", int)
    if not 0 < port < 65536:
        raise RouteError(f"{where}.port: {port}, expected 1 to 65535")
    return Target(
        _typed(serving.get("engine"), f"{where}.engine", str), _typed(serving.get("generation"), f"{where}.generation", int),
        _typed(serving.get("host"), f"{where}.host", str), port,
    )


def _typed(value: object, where: str, kind: type[T]) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RouteError(f"{where}: {str(value)[:40]!r}, expected {kind.__name__}")
    return value
