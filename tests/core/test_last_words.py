from __future__ import annotations

import pytest

from vllm_watchdog.core.findings import NOTHING, Verdict
from vllm_watchdog.core.last_words import KEPT, last_words, with_the_end
from vllm_watchdog.core.signatures import Phase
from vllm_watchdog.core.verdict import classify


def judged(text: str) -> Verdict:
    return with_the_end(classify(text.splitlines()), text, len(text.splitlines()))


def test_the_last_lines_are_kept_without_blanks_colours_prefixes_secrets_and_ours() -> None:
    ours = "# llm-watchdog: primary#1 starts at noon"
    text = "\n".join(["(APIServer pid=7) old", *"abc", ours, "\x1b[31mno  more\x1b[0m", "", "--api-key sk-abcdefgh", "  \n"])
    assert last_words(text) == ("a", "b", "c", "no more", "--api-key ***")
    assert len(last_words("x\n" * 100)) == KEPT and last_words("") == ()


def test_what_our_own_polls_wrote_is_no_last_word() -> None:
    polls = "".join(f'INFO:     127.0.0.1:51930 - "GET {path} HTTP/1.1" 200 OK\n' for path in ("/health", "/metrics"))
    assert last_words(f"loaded\n{polls * 9}") == ("loaded",)
    assert last_words(polls) == ()


@pytest.mark.parametrize(("line", "class_"), [
    ("Segmentation fault (core dumped)", "unexpected_exit"),
    ("Killed", "unexpected_exit"),
    ("Aborted (core dumped)", "unexpected_exit"),
    ("./serve.sh: line 3:  1234 Killed                  vllm serve x", "unexpected_exit"),
    ("bash: line 1: vllm: command not found", "spawn_failed"),
    ("/bin/sh: 1: exec: vllm: not found", "spawn_failed"),
    ("python3: can't open file '/srv/run.py': [Errno 2] No such file or directory", "spawn_failed"),
    ("bash: /opt/vllm/bin/vllm: Permission denied", "spawn_failed"),
    ("env: 'python9': No such file or directory", "spawn_failed"),
    ("Killed the old cache entry", "none"),
    ("Killed it", "none"),
    ("user said: Segmentation fault", "none"),
    ("WARNING 10-26 21:05:17 [utils.py:84] x: No such file or directory", "none"),
    ("", "none"),
])
def test_a_log_that_ends_in_a_shell_s_word_says_so(line: str, class_: str) -> None:
    text = f"hello\n{line}\n\n"
    assert judged(text).class_ == class_
    if class_ != "none":
        assert judged(text).evidence == ((2, line),) and judged(text.rstrip()).evidence == ((2, line),)


def test_only_its_very_end_counts() -> None:
    assert judged("Killed\nhello\n") == NOTHING


def test_a_missing_file_is_no_failed_command_once_vllm_has_spoken() -> None:
    said = "INFO 10-26 21:05:17 [api_server.py:9] vLLM API server version 0.33.0\n"
    assert judged(said + "cat: /x: No such file or directory\n").class_ == "none"
    assert judged(said + "Segmentation fault\n").class_ == "unexpected_exit"


def test_what_is_known_already_and_what_follows_a_stop_stand() -> None:
    known = Verdict("bad_args", NOTHING.severity, NOTHING.action, Phase.STARTUP)
    assert with_the_end(known, "Killed\n", 1) is known
    stopped = Verdict("none", NOTHING.severity, NOTHING.action, Phase.SHUTDOWN)
    assert with_the_end(stopped, "Killed\n", 1) is stopped
