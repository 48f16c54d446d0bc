"""`llm-watchdog explain` and the table of rules, as operators read them."""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import model
from tests.system.harness import Said, command

from vllm_watchdog.app.check_config import check

CONFIG = f"""
[daemon]
state_dir = "state"
[engines.short]
command = [{json.dumps(sys.executable)}, "serve"]
model = "m"
port = 8100
gpus = [0]
args = {{ gpu-memory-utilization = 0.55, max-model-len = 8192 }}
[engines.short-b]
backup_for = "short"
port = 8101
[engines.long]
command = [{json.dumps(sys.executable)}, "serve"]
model = "m-awq"
port = 8102
gpus = [0]
args = {{ gpu-memory-utilization = 0.4, max-model-len = "128k", served-model-name = "m" }}
[gateway.keys]
batch = "SECRET"
[[gateway.rules]]
engine = "long"
prompt_tokens_min = 6000
when_down = "refuse"
[[gateway.rules]]
engine = "long"
api_key = "batch"
header = "X-Tier: b*"
when_down = "spill"
"""

@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def explain(*words: str) -> Said:
    said = command("explain", *words)
    assert "SECRET" not in said.out + said.err
    return said


@contextmanager
def daemon(here: Path, **serving: str | None) -> Iterator[None]:
    """Answers every question with who serves each service."""
    services = [{"name": name, "serving": engine, "wanted": name, "lowered": None} for name, engine in serving.items()]
    services[0]["lowered"] = {"to": 4, "since": 0, "why": ""}

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(json.dumps({"services": services}).encode() + b"\n")

    (here / "state").mkdir()
    with socketserver.ThreadingUnixStreamServer(str(here / "state" / "control.sock"), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def test_the_rule_that_decides_is_named_with_its_engine_and_limit() -> None:
    said = explain("--model", "m", "--tokens", "9000")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines() == [
        "POST /v1/chat/completions, model m, 9000 prompt tokens",
        "   1  6000 prompt tokens or more        -> long  when down: refuse   this one",
        "   2  header X-Tier: b*, API key batch  -> long  when down: spill    no: API key",
        "service long: rule 1 matches", "  engines: long", "  limit: 128000 prompt tokens, 119000 more than this has",
        "  now: the daemon does not answer, so this is as if every engine served",
    ]


def test_key_and_header_are_looked_at() -> None:
    with_key = explain("--api-key", "batch", "--header", "x-tier: batch", "--tokens", "1")
    assert "service long: rule 2 matches\n" in with_key.out and "no: length" in with_key.out
    shown = explain("--header", "Authorization: Bearer SECRET", "--header", "X-Tier: b", "--tokens", "1")
    assert "service long: rule 2 matches\n" in shown.out
    assert "no: header\n" in explain("--api-key", "batch", "--tokens", "1").out


def test_without_a_rule_the_model_decides_and_a_long_prompt_is_said_to_be_refused() -> None:
    said = explain("--model", "other", "--tokens", "5")
    assert "service short: no rule matches, it is the first\n  engines: short (backup: short-b)\n" in said.out
    too_long = explain("--model", "m", "--tokens", "200000")
    assert too_long.code == 1
    assert "  limit: 128000 prompt tokens, 72000 fewer than this has, so it is refused\n" in too_long.out


def test_a_prompt_that_is_cut_is_said_to_be(here: Path) -> None:
    (here / "config.toml").write_text(CONFIG.replace('model = "m-awq"', 'model = "m-awq"\nover_limit = "truncate"'))
    said = explain("--model", "m", "--tokens", "200000")
    assert said.code == 0
    assert "  limit: 128000 prompt tokens, 72000 fewer than this has, so it is cut\n" in said.out


def test_a_body_is_counted(here: Path) -> None:
    body = here / "body.json"
    body.write_text(json.dumps({"model": "m", "prompt": "word " * 10_000}))
    said = explain("--path", "/v1/completions", "--file", str(body))
    assert said.out.startswith("POST /v1/completions, model m, some 12507 prompt tokens by its size\n"), "no tokenizer here"
    assert "service long: rule 1 matches\n" in said.out


def test_a_body_is_counted_by_the_models_own_tokenizer(here: Path) -> None:
    folder = model.write(here / "model")
    (here / "config.toml").write_text(CONFIG.replace('model = "m"\n', f'model = "{folder}"\n').replace(
        "max-model-len = 8192", 'max-model-len = 8192, served-model-name = "m"'))
    body = here / "body.json"
    for words, tokens, service in ((1000, 5001, "short"), (1200, 6001, "long")):
        body.write_text(json.dumps({"model": "m", "prompt": "word " * words}))
        said = explain("--path", "/v1/completions", "--file", str(body))
        assert said.out.startswith(f"POST /v1/completions, model m, {tokens} prompt tokens\n")
        assert f"service {service}: " in said.out
    body.write_text('{"model": "m", "messages": "SECRET"}')
    said = explain("--file", str(body))
    assert said.code == 1
    assert "\nthe gateway refuses it where its length matters: messages: expected a list\n" in said.out


def test_a_body_is_counted_by_the_engine_that_serves_where_no_tokenizer_is_here(here: Path) -> None:
    class Engine(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps({"count": said["prompt"].count("word"), "max_model_len": 8192}).encode()
            self.send_response(200 if self.path == "/tokenize" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Not on stderr."""

    body = here / "body.json"
    body.write_text(json.dumps({"model": "m", "prompt": "word " * 5000}))
    with HTTPServer(("127.0.0.1", 0), Engine) as engine, daemon(here, short="short", long="long"):
        threading.Thread(target=engine.serve_forever, args=(0.01,), daemon=True).start()
        (here / "config.toml").write_text(CONFIG.replace("port = 8100", f"port = {engine.server_port}"))
        said = explain("--path", "/v1/completions", "--file", str(body))
        engine.shutdown()
    assert said.out.startswith("POST /v1/completions, model m, 5000 prompt tokens\n"), "6257 by its size, which is long"
    assert (said.code, "service short: " in said.out) == (0, True)


@pytest.mark.parametrize("text", ["{bad", "[1]", "", "1" * 5000, "[" * 100_000])
def test_a_file_that_holds_no_request_is_said(here: Path, text: str) -> None:
    (here / "body.json").write_text(text)
    said = explain("--path", "/v1/completions", "--file", "body.json")
    assert (said.code, said.err) == (2, "body.json: expected a JSON object, the body of a request to /v1/completions\n")


def test_a_request_without_a_prompt_needs_no_length() -> None:
    said = explain("--path", "/tokenize")
    assert (said.code, said.out.splitlines()[0]) == (0, "POST /tokenize, no model named, 0 prompt tokens")


def test_what_is_not_posted_to_is_asked_for_with_get() -> None:
    said = explain("--path", "/v1/models")
    assert (said.code, said.out.splitlines()[0]) == (0, "GET /v1/models, no model named, 0 prompt tokens")


@pytest.mark.parametrize(("words", "problem"), [
    (("--model", "m"), "a rule depends on the length of the prompt, expected --tokens N or --file BODY.json"),
    (("--api-key", "bach", "--tokens", "1"), "--api-key bach: expected a name of gateway.keys, one of batch"),
    (("--header", "SECRET", "--tokens", "1"), "--header: without a colon, expected 'Name: value'"),
    (("--header", "a: b\nc: d", "--tokens", "1"),
     "a path or a header holds a line break or what is not ASCII, expected one line"),
    (("--path", "v1", "--tokens", "1"), "--path v1: expected it to begin with /"),
    (("--header", "Host: x", "--tokens", "1"),
     "--path or --header: The request is not valid HTTP/1.1: expected one Host header"),
    (("--file", "nothing.json"), "nothing.json: No such file or directory, expected the body of a request"),
    (("--file", "/dev/zero"), "/dev/zero: more than gateway.max_body_mib, which the gateway refuses with 413")])
def test_what_is_no_request_is_said_in_one_line(words: tuple[str, ...], problem: str) -> None:
    said = explain(*words)
    assert (said.code, said.out, said.err) == (2, "", problem + "\n")


def test_live_state_decides_where_the_daemon_answers(here: Path) -> None:
    with daemon(here, short="short-b", long=None):
        refused = explain("--tokens", "9000")
        assert refused.code == 1
        assert "service long: rule 1 matches; it is down, so the request gets 503 at once\n" in refused.out
        assert "  now: down, long is wanted\n" in refused.out
        spilled = explain("--api-key", "batch", "--header", "X-Tier: b", "--tokens", "1")
        assert spilled.code == 0
        assert "service short: rule 2 matches, and spills while long is down\n" in spilled.out
        assert "  now: short-b serves, 4 requests at a time\n" in spilled.out


def test_what_fits_nowhere_else_waits(here: Path) -> None:
    rules = CONFIG.replace('when_down = "refuse"', 'when_down = "spill"')
    (here / "config.toml").write_text(rules)
    with daemon(here, short="short", long=None):
        said = explain("--tokens", "9000")
        assert "it is down, and no other engine takes it, so the request waits, for 60 s at most\n" in said.out
        assert "service short: rule 1 matches, and spills while long is down\n" in explain("--tokens", "7000").out


def test_a_service_that_the_daemon_does_not_know_is_said(here: Path) -> None:
    with daemon(here, short="short"):
        assert "  now: the daemon does not know it: reload or restart it\n" in explain("--tokens", "9000").out


def test_check_config_shows_the_rules_and_the_sum_of_a_cards_shares(here: Path) -> None:
    out, err = StringIO(), StringIO()
    assert check(here / "config.toml", out, err) == 0
    text = out.getvalue()
    assert "GPU 0: engines take short 0.55 + long 0.4 = 0.95, with CUDA contexts of 0.01 each 0.97 of its memory" in text
    assert "warning" not in text
    start = text.index("the gateway's rules")
    assert text[start:].splitlines()[:4] == [
        "the gateway's rules, of which the first that matches counts:",
        "   1  6000 prompt tokens or more        -> long  when down: refuse",
        "   2  header X-Tier: b*, API key batch  -> long  when down: spill",
        "  else by the request's model: m -> short; any other -> short"]


def test_shares_that_are_more_than_the_card_with_their_contexts_are_told(here: Path) -> None:
    (here / "config.toml").write_text(CONFIG.replace("0.55", "0.59"))
    out = StringIO()
    assert check(here / "config.toml", out, StringIO()) == 0
    assert ("warning: engines: on GPU 0 short 0.59 + long 0.4 = 0.99, with CUDA contexts of 0.01 each 1.01: more than the "
            "card, the last one to start will not fit\n") in out.getvalue()


def test_the_completion_knows_it() -> None:
    said: Any = command("completion", "bash")
    assert "explain" in said.out and "--api-key" in said.out


DOCS = Path(__file__).parents[2] / "docs"


def test_the_two_engine_example_is_accepted_without_a_doubt_and_prints_what_its_page_shows(
        here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHORT", "LONG"):
        monkeypatch.setenv(f"LLM_WATCHDOG_ENGINES__{name}__COMMAND", json.dumps([sys.executable, "serve"]))
    for key in ("STATE_DIR", "LOG_DIR"):
        monkeypatch.setenv(f"LLM_WATCHDOG_DAEMON__{key}", str(here))
    config = ("--config", str(DOCS / "two-engines.toml"))
    checked = command("check-config", *config)
    assert (checked.code, checked.err) == (0, "") and "warning" not in checked.out
    page = (DOCS / "two-engines.md").read_text()
    shown = [block.splitlines() for block in page.split("```")[1::2]]
    for line in (line for block in shown for line in block if line):
        assert line in checked.out.splitlines(), "the page shows it otherwise"
    for tokens, engine in ((5999, "short"), (6000, "long")):
        assert f"service {engine}: rule " in command("explain", "--model", "qwen3-4b", "--tokens", str(tokens), *config).out
