"""The gateway's rules: from the settings to what the route carries, and what is wrong or doubtful about them.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_watchdog.config_problems import near
from vllm_watchdog.config_sources import Path_
from vllm_watchdog.gateway_rules import Rule, fits, key_of, unreachable

if TYPE_CHECKING:
    from vllm_watchdog.config import Settings
    from vllm_watchdog.config_sections import Rule as Written

Found = Iterator[tuple[Path_, str]]


def rules(settings: Settings) -> tuple[Rule, ...]:
    """In order.  The settings are checked: every name is one."""
    return tuple(_rule(settings, written) for written in settings.gateway.rules)


def _rule(settings: Settings, written: Written) -> Rule:
    key = None if written.api_key is None else key_of(settings.gateway.keys[written.api_key].get_secret_value().encode())
    return Rule(
        written.engine, written.when_down, written.prompt_tokens_min, written.prompt_tokens_max, written.model, written.path,
        written.header, key, written.api_key or "",
    )


def models_by_service(settings: Settings) -> dict[str, tuple[str, ...]]:
    """What a primary and its backup serve."""
    launches = settings.launches()
    found: dict[str, tuple[str, ...]] = {}
    for name, engine in settings.engines.items():
        service = engine.backup_for or name
        found[service] = tuple(dict.fromkeys((*found.get(service, ()), *launches[name].models)))
    return found


def wrong(settings: Settings) -> Found:
    primaries = [name for name, engine in settings.engines.items() if engine.backup_for is None]
    for index, rule in enumerate(settings.gateway.rules):
        at = ("gateway", "rules", index)
        if not rule.engine:
            yield (*at, "engine"), f"missing, expected an engine, {near('', primaries)}"
        elif rule.engine not in settings.engines:
            yield (*at, "engine"), f'no engine is called "{rule.engine:.32}", expected {near(rule.engine, primaries)}'
        elif (primary := settings.engines[rule.engine].backup_for) is not None:
            yield (*at, "engine"), f'is the backup of "{primary:.32}", expected that: its backup comes with it'
        if rule.prompt_tokens_max is not None and rule.prompt_tokens_max < rule.prompt_tokens_min:
            what = f"{rule.prompt_tokens_max} lies below prompt_tokens_min, expected at least {rule.prompt_tokens_min}"
            yield (*at, "prompt_tokens_max"), what
        if rule.api_key is not None and rule.api_key not in settings.gateway.keys:
            what = f'no key is called "{rule.api_key:.32}", expected a name of gateway.keys, '
            yield (*at, "api_key"), what + near(rule.api_key, settings.gateway.keys)
    digests: dict[str, str] = {}
    for name, key in settings.gateway.keys.items():
        if (other := digests.setdefault(key.get_secret_value(), name)) != name:
            yield ("gateway", "keys", name), f"is the same as gateway.keys.{other}, expected each key once"


def doubtful(settings: Settings) -> Found:
    """Of settings without anything wrong."""
    made = rules(settings)
    models = models_by_service(settings)
    for index, numbers in unreachable(made, models.__getitem__):
        yield ("gateway", "rules", index), f"is never reached: whatever it could get, rule {numbers} takes before it"
    for index, rule in enumerate(made):
        at = ("gateway", "rules", index)
        length = settings.engine(rule.service).args.get("max-model-len")
        if isinstance(length, int) and rule.tokens_min >= length:
            what = f"{rule.tokens_min} is more than {rule.service} takes: its max-model-len is {length}"
            yield (*at, "prompt_tokens_min"), what
        if rule.model is not None and not any(fits(rule.model, model) for model in models[rule.service]):
            served = ", ".join(models[rule.service])
            yield (*at, "model"), f'"{rule.model:.60}" is no model of {rule.service}, which serves {served:.100}'
