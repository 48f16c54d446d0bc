"""OpenAI's client reads the same from a real vLLM through a gateway that merges deltas as from the engine itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest
from tests.real.conftest import Figures
from tests.real.rig import START_S, RealWatchdog, Vllm
from tests.system.harness import Doc, free_port
from tests.system.test_gateway import gateway

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

LISTEN = f"127.0.0.1:{free_port()}"
CHARS = 24

# What a client makes of each stream, and in how many events it came.
READ = """
import json, sys
import openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
plain = {"model": "tiny", "max_tokens": 16, "temperature": 0, "seed": 7, "stream": True,
         "stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
hello = [{"role": "user", "content": "What is a watchdog?"}]
def chat(**more):
    said, events = {}, 0
    for chunk in client.chat.completions.create(messages=hello, **plain | more):
        events += 1
        for choice in chunk.choices:
            one = said.setdefault(choice.index, {"text": "", "role": [], "finish": [], "logprobs": []})
            one["text"] += choice.delta.content or ""
            one["role"] += [choice.delta.role] if choice.delta.role else []
            one["finish"] += [choice.finish_reason] if choice.finish_reason else []
            one["logprobs"] += [each.token for each in choice.logprobs.content or []] if choice.logprobs else []
    return {"said": said, "usage": chunk.usage.model_dump() if chunk.usage else None}, events
def complete(**more):
    text, finish, events = "", [], 0
    for chunk in client.completions.create(prompt="What is a watchdog?", **plain | more):
        events += 1
        for choice in chunk.choices:
            text += choice.text
            finish += [choice.finish_reason] if choice.finish_reason else []
    return {"said": text, "finish": finish, "usage": chunk.usage.model_dump() if chunk.usage else None}, events
print(json.dumps({
    "chat": chat(), "chat, short": chat(max_tokens=3), "chat, log probabilities": chat(logprobs=True),
    "chat, usage all along": chat(
        stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "completion": complete(), "completion, until a stop": complete(stop=["a", "e"]),
}))
"""
MERGED = {"chat", "completion"}     # the others have a reason, or too little, to stay as they are


@pytest.fixture(scope="module")
def host(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWatchdog]:
    settings: Doc = {"listen": LISTEN, "coalesce_chars": CHARS, "coalesce_s": 5.0}
    # What is compared is what was said, so an engine that is starved by its neighbours shall have the time that it needs.
    made = RealWatchdog(tmp_path_factory.mktemp("merging"), {"primary": vllm.engine()}, gateway=settings,
                        hang={"patience_s": START_S})
    made.start()
    yield made
    made.finish()


def test_a_client_of_merged_streams_ends_with_what_the_engine_said(vllm: Vllm, host: RealWatchdog, figures: Figures) -> None:
    host.serving("primary", within_s=START_S)

    def read(url: str) -> dict[str, tuple[Doc, int]]:
        said = subprocess.run([str(vllm.python), "-c", READ, url], capture_output=True, text=True, timeout=START_S,
                              check=False)
        assert said.returncode == 0, said.stderr
        return dict(json.loads(said.stdout))

    with gateway(host):
        direct, merged = read(host.url("primary")), read(f"http://{LISTEN}")
    assert {what: said for what, (said, _) in merged.items()} == {what: said for what, (said, _) in direct.items()}
    events = {what: (direct[what][1], merged[what][1]) for what in direct}
    assert all(after <= before for before, after in events.values()), events
    assert all(events[what][1] < events[what][0] / 2 for what in MERGED), events
    figures("deltas merged by the gateway", note=", ".join(f"{what}: {a} -> {b} events" for what, (a, b) in events.items()))
