"""Which engine gets which request: the rules, what they match, and which of them can never be reached.  Pure.

Settings write them, the daemon's route document carries them, the gateway and `explain` go by them.  A pattern is a text
that must be equal, or with `*` at its end the beginning of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum, auto
from hashlib import blake2b
from typing import Any, Protocol


class WhenDown(StrEnum):
    """What becomes of a rule's requests while its engine and that one's backup are down."""

    WAIT = auto()       # as ever: held for `hold_s`
    REFUSE = auto()     # 503 at once
    SPILL = auto()      # to the next rule that matches, or where it would go without rules


class Asked(Protocol):
    """What rules look at.  `key`: of whom, hashed; `bound`: more tokens it can't be; `tokens` None: not counted."""

    @property
    def path(self) -> str: ...
    @property
    def model(self) -> str | None: ...
    @property
    def key(self) -> str: ...
    @property
    def bound(self) -> int: ...
    @property
    def tokens(self) -> int | None: ...


Header = Callable[[str], str | None]        # of a request, by its name in lower case


@dataclass(frozen=True, slots=True)
class Rule:
    """`service`: by its primary's name.  `header`: a name, or `Name: pattern`.  `key`: hashed; `key_name`: as the
    settings call it.  None: whatever it is."""

    service: str
    when_down: WhenDown = WhenDown.WAIT
    tokens_min: int = 0
    tokens_max: int | None = None
    model: str | None = None
    path: str | None = None
    header: str | None = None
    key: str | None = None
    key_name: str = ""

    def misses(self, asked: Asked, header: Header) -> str | None:
        """What does not match, empty where all does; None: that depends on tokens that nobody has counted yet."""
        pairs = (("path", self.path, asked.path), ("model", self.model, asked.model), ("API key", self.key, asked.key))
        for what, pattern, value in pairs:
            if not fits(pattern, value):
                return what
        if self.header is not None:
            name, pattern = _split(self.header)
            if not fits(pattern, header(name)):
                return "header"
        measured = self._measured(asked)
        return None if measured is None else "" if measured else "length"

    def _measured(self, asked: Asked) -> bool | None:
        most, known = (asked.bound, False) if asked.tokens is None else (asked.tokens, True)
        if most < self.tokens_min:
            return False
        if self.tokens_max is None or most <= self.tokens_max:
            return True if known or not self.tokens_min else None
        return False if known else None

    def covers(self, other: Rule) -> bool:
        """Whatever the other one matches, this one does, tokens aside."""
        pairs = ((self.path, other.path), (self.model, other.model), (self.key, other.key))
        return all(wider(mine, its) for mine, its in pairs) and _wider_header(self.header, other.header)

    @property
    def conditions(self) -> str:
        """For people."""
        said = [_tokens(self.tokens_min, self.tokens_max)]
        said += [f"{name} {value}" for name, value in (("model", self.model), ("path", self.path), ("header", self.header))
                 if value is not None]
        said += [f"API key {self.key_name}"] if self.key is not None else []
        return ", ".join(filter(None, said)) or "every request"

    def document(self) -> dict[str, Any]:
        """As the route carries it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def key_of(token: bytes) -> str:
    """Who it is, without the secret: the same for the same token, also after a restart."""
    return blake2b(token, digest_size=8).hexdigest() if token else ""


def fits(pattern: str | None, text: str | None) -> bool:
    """No pattern: everything fits, also what isn't there."""
    if pattern is None:
        return True
    if text is None:
        return False
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


def wider(pattern: str | None, other: str | None) -> bool:
    """Does it match whatever the other pattern does?"""
    if pattern is None or other is None:
        return pattern is None
    return other.startswith(pattern[:-1]) if pattern.endswith("*") else pattern == other


def _wider_header(header: str | None, other: str | None) -> bool:
    if header is None or other is None:
        return header is None
    (name, pattern), (its, narrower) = _split(header), _split(other)
    return name == its and wider(pattern, narrower)


def _split(header: str) -> tuple[str, str]:
    """Its name in lower case, and a pattern."""
    name, _, pattern = header.partition(":")
    return name.strip().lower(), pattern.strip() or "*"


def _tokens(least: int, most: int | None) -> str:
    if most is None:
        return f"{least} prompt tokens or more" if least else ""
    return f"{least} to {most} prompt tokens" if least else f"at most {most} prompt tokens"


def applicable(rule: Rule, model: str | None, models: Sequence[str], known: Iterable[str]) -> bool:
    """A rule that names no model leaves those alone that other engines serve, and not its own.

    `models`: its own engine's, `known`: those of all; a name that none has, such as an adapter's, is no hindrance."""
    return rule.model is not None or model is None or model in models or model not in known


def unreachable(rules: Sequence[Rule], models: Callable[[str], Sequence[str]]) -> Iterator[tuple[int, str]]:
    """Rules that earlier ones leave nothing to, and the numbers of those, counted from 1.  One that spills leaves something.

    `models`: what a service serves."""
    for index, rule in enumerate(rules):
        before = [(number, each) for number, each in enumerate(rules[:index], 1)
                  if each.when_down is not WhenDown.SPILL and each.covers(rule) and _same_models(each, rule, models)]
        taken = _taken(before, rule)
        if taken:
            yield index, " and ".join(map(str, taken))


def _same_models(earlier: Rule, later: Rule, models: Callable[[str], Sequence[str]]) -> bool:
    """Is the earlier one applicable to every model that the later one gets?"""
    if earlier.model is not None or earlier.service == later.service:
        return True
    its = models(later.service) if later.model is None else (later.model,)
    return set(its) <= set(models(earlier.service))


def _taken(before: Iterable[tuple[int, Rule]], rule: Rule) -> list[int]:
    """Those that together match each length of prompt that the rule asks for; empty: some length is left to it."""
    reached = rule.tokens_min
    used: list[int] = []
    for number, each in sorted(before, key=lambda pair: pair[1].tokens_min):
        if each.tokens_min > reached:
            break
        if each.tokens_max is None or (rule.tokens_max is not None and each.tokens_max >= rule.tokens_max):
            return sorted([*used, number])
        if each.tokens_max >= reached:
            reached = each.tokens_max + 1
            used.append(number)
    return []
