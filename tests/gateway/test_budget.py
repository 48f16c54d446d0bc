"""How many tokens a prompt may have: the least of what is configured and of what there is."""

from __future__ import annotations

import pytest

from vllm_watchdog.core.kv_bytes import KvShape
from vllm_watchdog.gateway.ask import Ask, ask_of
from vllm_watchdog.gateway.budget import Budget, Engine, Verdict, budget
from vllm_watchdog.gateway.heads import parse_request
from vllm_watchdog.prompt_plan import Over, PromptPlan, PromptPlanError, heard, told

QWEN3_4B = KvShape(36, 4096)        # 144 KiB a token
GIB = 1 << 30


@pytest.mark.parametrize(("plan", "engine", "longest", "room"), [
    (PromptPlan(), Engine(), None, None),
    (PromptPlan(limit=500), Engine(), 500, None),
    (PromptPlan(limit=500, context=400), Engine(context=300, kv_tokens=100), 300, None),
    (PromptPlan(context=400), Engine(context=9000), 400, None),
    (PromptPlan(vram_share=0.5), Engine(vram_free=10 * GIB, shape=QWEN3_4B), 36408, 36408),     # the articles' 10 GiB
    (PromptPlan(vram_share=0.5, limit=9), Engine(vram_free=10 * GIB, shape=QWEN3_4B), 9, 36408),
    (PromptPlan(vram_share=0.5), Engine(vram_free=10 * GIB), None, None),
    (PromptPlan(), Engine(vram_free=10 * GIB, shape=QWEN3_4B), None, None),
])
def test_the_least_counts_and_what_is_not_known_does_not(
        plan: PromptPlan, engine: Engine, longest: int | None, room: int | None) -> None:
    found = budget(plan, engine)
    assert (found.longest, found.room) == (longest, room)


@pytest.mark.parametrize(("longest", "over", "verdict"), [
    (100, Over.REFUSE, Verdict.FITS), (101, Over.WAIT, Verdict.TOO_LONG), (101, Over.REFUSE, Verdict.TOO_LONG),
    (101, Over.TRUNCATE, Verdict.CUT), (101, Over.TRUNCATE_ANY, Verdict.CUT), (100, Over.TRUNCATE, Verdict.FITS),
])
def test_what_becomes_of_a_prompt(longest: int, over: Over, verdict: Verdict) -> None:
    ask = Ask("/v1/completions", "", None, 1000, tokens=5000, longest=longest)
    assert Budget(longest=100).verdict(ask, over) is verdict
    assert Budget().verdict(ask, over) is Verdict.FITS


@pytest.mark.parametrize(("limit", "context", "answer", "to"), [
    (100, None, None, 100), (100, 1000, 50, 100), (1000, 1000, 50, 950), (1000, 1000, None, 500), (4000, 4000, None, 3488),
    (1000, 1000, 999, 500), (1, 1, None, 1),
])
def test_a_cut_prompt_leaves_room_for_its_answer(limit: int, context: int | None, answer: int | None, to: int) -> None:
    ask = Ask("/v1/completions", "", None, 9999, tokens=9999, longest=9999, max_tokens=answer)
    assert Budget(limit, None, context).cut_to(ask) == to


def test_a_plan_is_heard_as_it_was_told() -> None:
    plan = PromptPlan("t", "/hub", "r", "x.jinja", "openai", "fp8", 9, 8, Over.TRUNCATE, 7, 0.5)
    assert heard(told(plan)) == plan and heard({}) == PromptPlan() and heard({"unheard": "of"}) == PromptPlan()


@pytest.mark.parametrize(
    "said", [{"limit": "9"}, {"over": "cut"}, {"tokenizer": None}, {"media_tokens": True}, {"vram_share": 1}])
def test_what_is_no_plan_says_where(said: dict[str, object]) -> None:
    with pytest.raises(PromptPlanError, match=next(iter(said))):
        heard(said)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n%b\r\n"


@pytest.mark.parametrize(("lines", "shows"), [
    (b"Authorization: Bearer sk-1\r\n", True), (b"authorization:bearer  sk-1\r\n", True), (b"X-API-Key: sk-1\r\n", True),
    (b"Authorization: Basic sk-1\r\n", False), (b"", False),
])
def test_whose_request_it_is_is_known_without_the_secret(lines: bytes, shows: bool) -> None:
    key = ask_of(parse_request(HEAD % lines), b"{}").key
    assert (key == ask_of(parse_request(HEAD % b"X-Api-Key: sk-1\r\n"), b"{}").key) is shows and "sk-1" not in key
    assert bool(key) is shows


@pytest.mark.parametrize(("body", "bound", "media"), [
    (b"x" * 100, 1124, 0), ("é".encode() * 100, 1624, 0), (b'{"tools":1}', 1024 + 88, 0),
    (b'{"type":"image_url","image_url":{}}', 1024 + 35, 2), (b"x" * (32 << 10) + b"x", 1024 + 8 * 32769, 1365),
])
def test_a_bound_is_never_too_low(body: bytes, bound: int, media: int) -> None:
    ask = ask_of(parse_request(HEAD % b""), body)
    assert (ask.bound, ask.media, ask.cost) == (bound, media, bound)
