"""How long a prompt of one engine may be, and whose tokenizer measures it; the daemon tells it with the route.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG]?)")
UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}    # as vLLM reads them


class Over(StrEnum):
    """What becomes of a prompt that is too long: for ever, or for what is free at the moment."""

    WAIT = "wait"                   # refused if it can never fit, else it waits for room
    REFUSE = "refuse"
    TRUNCATE = "truncate"           # tool results and JSON modes are refused
    TRUNCATE_ANY = "truncate-any"


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """`tokenizer`: a folder or a name in `hub`, Hugging Face's cache; empty: only the engine itself can tell.
    `template`: a file, or the text; empty: the model's own.  `context`: --max-model-len; None: the engine tells.
    `limit`: tokens; None: as many as the engine takes.  `media_tokens`: of an image, a video or a recording.
    `vram_share`: of the free VRAM that a prompt may take; None: that doesn't matter, since prefill goes in chunks."""

    tokenizer: str = ""
    hub: str = ""
    revision: str = ""
    template: str = ""
    template_format: str = "auto"
    kv_dtype: str = "auto"
    context: int | None = None
    limit: int | None = None
    over: Over = Over.WAIT
    media_tokens: int = 1024
    vram_share: float | None = None

    def limited_as(self, other: PromptPlan) -> PromptPlan:
        """What an operator may change while the engine runs."""
        return replace(
            self, limit=other.limit, over=other.over, media_tokens=other.media_tokens, vram_share=other.vram_share)


def context_of(args: Mapping[str, object]) -> int | None:
    """Of --max-model-len; None where it says nothing, or leaves it to vLLM."""
    found = SIZE.fullmatch(str(args.get("max-model-len", "")))
    return int(float(found[1]) * UNITS[found[2]]) or None if found else None


def is_text(template: str) -> bool:
    """--chat-template takes a file or the text itself."""
    return any(mark in template for mark in "{}\n")


def hub_of(env: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps what it downloaded, by an environment."""
    if cache := env.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := env.get("HF_HOME"):
        return Path(home) / "hub"
    return Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "/root") / ".cache") / "huggingface" / "hub"


class PromptPlanError(Exception):
    """`key: what, expected what`."""


def heard(said: Mapping[str, Any]) -> PromptPlan:
    """As `told` wrote it; keys that this version does not know are ignored.  Raises PromptPlanError."""
    values: dict[str, Any] = {}
    for name, kinds in FIELDS.items():
        value = said.get(name, DEFAULT[name])
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise PromptPlanError(f"{name}: {str(value)[:40]!r}, expected {' or '.join(kind.__name__ for kind in kinds)}")
        values[name] = value
    if values["over"] not in set(Over):
        raise PromptPlanError(f"over: {values['over'][:40]!r}, expected one of {', '.join(Over)}")
    return PromptPlan(**values | {"over": Over(values["over"])})


def told(plan: PromptPlan) -> dict[str, Any]:
    """For the route document."""
    return {name: getattr(plan, name) for name in PromptPlan.__slots__}


DEFAULT = told(PromptPlan())
FIELDS: dict[str, tuple[type, ...]] = {
    name: (int, type(None)) if value is None else (type(value),) for name, value in DEFAULT.items()
} | {"vram_share": (float, type(None)), "over": (str,)}
