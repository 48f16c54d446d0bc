"""Takes secrets out of text before it is written down.  Pure.

It knows the shapes that secrets have in logs, environments and command lines, and the very values that a launch was
given.  Rather one word too many than one too few.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from io import StringIO

from vllm_watchdog.launch import MASK, Launch, secret_name

# Every repetition is bounded: prompts choose what stands in a log, and must not be able to make this slow.
VALUE = r"""(?:\[[^\]]{0,400}\]|"[^"]{0,400}"|'[^']{0,400}'|[^\s"',;&)}\]]+)"""
LOUD = "[A-Z0-9_]{0,40}(?:_TOKEN|_KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)[A-Z0-9_]{0,40}"
QUIET = "(?i:hf[_-]token|api[_-]?key|access[_-]token|password)"
SHAPES = tuple(
    (re.compile(pattern), rf"\g<1>{MASK}")
    for pattern in (
        rf"(\b(?:{LOUD}|{QUIET})[\"']?\s{{0,3}}[=:]\s{{0,3}}){VALUE}",
        rf"(--(?:api-key|[a-z-]{{0,40}}-(?:token|key|secret|password))[\"']?[\s=,]{{1,3}}){VALUE}",
        r"((?i:\bauthorization)[\"']?\s{0,3}[=:]\s{0,3}[\"']?)(?:(?i:bearer|basic)\s{1,3})?[^\s\"',]+",
        r"((?i:\bbearer)\s{1,3})[\w.~+/=-]{8,}",
        r"(\b[a-z][a-z0-9+.-]{0,20}://)[^@/\s\"']{1,400}(?=@)",
        r"(\b(?:sk-|hf_))[A-Za-z0-9_-]{16,}",
    )
)
SHORTEST = 6  # a shorter "secret" is part of ordinary words, and hides nothing


def mask(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without what looks like a secret, and without the `secrets` themselves."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    # Line by line, since one call on a megabyte would keep every other thread waiting meanwhile; and one line at a time,
    # since thousands of them that are there together leave the allocator in pieces.
    out = StringIO()
    out.writelines(map(_mask_line, StringIO(text, newline="")))
    return out.getvalue()


def _mask_line(line: str) -> str:
    for shape, instead in SHAPES:
        line = shape.sub(instead, line)
    return line


def secrets_of(launch: Launch) -> tuple[str, ...]:
    """The secret values that a launch was given."""
    values = [value for name, value in launch.env if secret_name(name)]
    if launch.api_key:
        values.append(launch.api_key.get_secret_value())
    values += [value for flag, value in zip(launch.argv, launch.argv[1:], strict=False) if _secret_flag(flag)]
    values += [word.partition("=")[2] for word in launch.argv if "=" in word and _secret_flag(word.partition("=")[0])]
    return tuple(value for value in values if len(value) >= SHORTEST)


def _secret_flag(word: str) -> bool:
    return word.startswith("--") and secret_name(word)
