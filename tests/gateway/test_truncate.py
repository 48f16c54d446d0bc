"""What a cut prompt keeps: its head and tail, its system prompt, its last turn; and what is never cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.model import write

from vllm_watchdog.gateway.tokens import Tokens
from vllm_watchdog.gateway.truncate import CannotCutError, cut
from vllm_watchdog.prompt_plan import PromptPlan

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Message = dict[str, Any]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens(write(tmp_path_factory.mktemp("model")), PromptPlan())


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200), limit=st.integers(12, 100))
def test_a_cut_text_fits_and_is_a_head_and_a_tail(tokens: Tokens, text: str, limit: int) -> None:
    shorter = cut(tokens, TEXT, {"prompt": text}, limit, False)["prompt"]
    assert tokens.count(TEXT, {"prompt": shorter}).tokens <= limit
    assert any(text.startswith(shorter[:at]) and text.endswith(shorter[at:]) for at in range(len(shorter) + 1))
    assert shorter == text or tokens.count(TEXT, {"prompt": text}).tokens > limit


@given(turns=st.lists(st.tuples(st.text("ab", max_size=30), st.text("cd", max_size=30)), min_size=1, max_size=8),
       system=st.text("s", max_size=20), limit=st.integers(80, 300))
def test_a_cut_chat_fits_and_keeps_its_system_prompt_and_its_last_turns(
        tokens: Tokens, turns: list[tuple[str, str]], system: str, limit: int) -> None:
    said = [message for one, two in turns for message in (user(one), {"role": "assistant", "content": two})]
    messages = [{"role": "system", "content": system}, *said, user("the last question " * 9)]
    left = cut(tokens, CHAT, {"messages": messages}, limit, False)["messages"]
    assert tokens.count(CHAT, {"messages": left}).tokens <= limit
    assert left[0] == messages[0] and left[-1]["role"] == "user"
    assert left[-1] == messages[-1] or len(left) == 2       # its text is cut only when nothing else is left
    assert left[1:-1] == messages[len(messages) - len(left) + 1 : -1]
    again = [messages[0], *messages[len(messages) - len(left) - 1 :]]      # one turn more would not fit
    assert left == messages or tokens.count(CHAT, {"messages": again}).tokens > limit


def test_token_ids_and_lists_of_prompts_keep_their_form(tokens: Tokens) -> None:
    assert cut(tokens, TEXT, {"prompt": list(range(10))}, 5, False)["prompt"] == [0, 1, 2, 8, 9]
    assert cut(tokens, TEXT, {"prompt": [[1, 2, 3], [4]]}, 2, False)["prompt"] == [[1, 3], [4]]
    assert cut(tokens, TEXT, {"prompt": ["abcdefgh", "a"]}, 5, False)["prompt"] == ["abgh", "a"]
    assert cut(tokens, "/v1/embeddings", {"input": "abcdefgh"}, 5, False) == {"input": "abgh"}


def test_the_longest_text_of_parts_is_cut_and_the_other_parts_stay(tokens: Tokens) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"type": "text", "text": "look"}, picture, {"type": "text", "text": "x" * 50 + "y" * 50}]
    left = cut(tokens, CHAT, {"messages": [{"role": "user", "content": parts}]}, 1024 + 60, False)["messages"][0]["content"]
    assert left[:2] == parts[:2]
    assert left[2]["text"].startswith("xxx") and left[2]["text"].endswith("yyy") and len(left[2]["text"]) < 40


CALL = {"type": "function", "function": {"name": "f"}}
TOOLS = [user("a" * 50), {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "r" * 50},
         user("b")]
REFUSED: dict[str, tuple[str, Message]] = {
    "a turn with tool results": (CHAT, {"messages": TOOLS}),
    "a tool result in the last turn": (CHAT, {"messages": TOOLS[:3]}),
    "an answer in JSON": (TEXT, {"prompt": "a" * 100, "response_format": {"type": "json_schema"}}),
    "an answer in a structure": (TEXT, {"prompt": "a" * 100, "structured_outputs": {"regex": "a"}}),
    "a system prompt": (CHAT, {"messages": [{"role": "system", "content": "s" * 100}, user("a")]}),
    "a kind that isn't known": ("/v1/responses", {"input": "a" * 100}),
    "no user": (CHAT, {"messages": [{"role": "assistant", "content": "a" * 100}]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_to_be_cut_is_refused_instead(name: str, tokens: Tokens) -> None:
    with pytest.raises(CannotCutError):
        cut(tokens, REFUSED[name][0], REFUSED[name][1], 40, False)


def test_turns_with_tool_results_go_where_that_is_allowed(tokens: Tokens) -> None:
    assert cut(tokens, CHAT, {"messages": TOOLS}, 40, True)["messages"] == TOOLS[3:]
    left = cut(tokens, CHAT, {"messages": [user("why"), *TOOLS[1:3]]}, 80, True)["messages"]
    assert left[:2] == [user("why"), TOOLS[1]] and 10 < len(left[2]["content"]) < 50
