"""How many tokens a prompt may have, and all prompts at once: the least of what is configured and of what there is.  Pure.

One: the model's context, which vLLM never starts without KV cache for.  VRAM matters only where an operator says so
(`vram_share`): a share of what is free, over what a token takes by the model's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto

from vllm_watchdog.core.kv_bytes import KvShape
from vllm_watchdog.gateway.ask import Ask
from vllm_watchdog.prompt_plan import Over, PromptPlan

ANSWER_TOKENS = 512     # room that a cut prompt leaves for an answer of unsaid length


@dataclass(frozen=True, slots=True)
class Engine:
    """What is known of the one that serves; None: not told.  `vram_free`: bytes, on all its cards together."""

    context: int | None = None
    kv_tokens: int | None = None
    vram_free: int | None = None
    shape: KvShape | None = None


class Verdict(StrEnum):
    FITS = auto()
    TOO_LONG = auto()
    CUT = auto()


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens; None: no limit.  `longest`: of one prompt, ever; `room`: of all at once; `context`: with the answer."""

    longest: int | None = None
    room: int | None = None
    context: int | None = None

    def verdict(self, ask: Ask, over: Over) -> Verdict:
        """`ask`: counted."""
        if self.longest is None or ask.longest <= self.longest:
            return Verdict.FITS
        return Verdict.CUT if over in (Over.TRUNCATE, Over.TRUNCATE_ANY) else Verdict.TOO_LONG

    def cut_to(self, ask: Ask) -> int:
        """Tokens that a prompt is cut to; half of the context is its own whatever the answer."""
        most = self.longest or ask.longest
        if self.context is None:
            return most
        answer = ANSWER_TOKENS if ask.max_tokens is None else ask.max_tokens
        return max(1, min(most, self.context - min(answer, self.context // 2)))


def budget(plan: PromptPlan, engine: Engine) -> Budget:
    context = _least(plan.context, engine.context)
    in_vram = _of_vram(plan, engine)
    return Budget(_least(plan.limit, context, in_vram), in_vram, context)


def _of_vram(plan: PromptPlan, engine: Engine) -> int | None:
    if plan.vram_share is None or engine.vram_free is None or engine.shape is None:
        return None
    return engine.shape.tokens(plan.vram_share * engine.vram_free)


def _least(*known: int | None) -> int | None:
    return min((each for each in known if each is not None), default=None)
