"""The gateway's rules as a table of text, for `check-config` and `explain`.  Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_watchdog.config import Settings
from vllm_watchdog.config_rules import models_by_service


def told(settings: Settings) -> Iterator[str]:
    """Nothing where one engine gets everything."""
    if settings.gateway.rules:
        yield "the gateway's rules, of which the first that matches counts:"
        yield from map(str.rstrip, rows(settings))
    services = models_by_service(settings)
    if settings.gateway.rules or len(services) > 1:
        first, *_ = services
        usual: dict[str, str] = {}
        for name, models in services.items():
            usual |= {model: name for model in models if model not in usual}
        by_model = ", ".join(f"{model} -> {name}" for model, name in usual.items())
        yield f"  else by the request's model: {by_model}; any other -> {first}"


def rows(settings: Settings) -> list[str]:
    """A line for each rule."""
    rules = settings.rules()
    width = max((len(rule.conditions) for rule in rules), default=0)
    engines = [backed(settings, rule.service) for rule in rules]
    wide = max(map(len, engines), default=0)
    return [f"  {number:>2}  {rule.conditions:<{width}}  -> {engine:<{wide}}  when down: {rule.when_down:<6}"
            for number, (rule, engine) in enumerate(zip(rules, engines, strict=True), 1)]


def backed(settings: Settings, service: str) -> str:
    """`long (backup: long-b)`."""
    backup = next((name for name, engine in settings.engines.items() if engine.backup_for == service), None)
    return f"{service} (backup: {backup})" if backup else service
