"""`llm-watchdog check-config`, as its users meet it."""

from __future__ import annotations

import json
import shlex
import sys
from io import StringIO
from pathlib import Path

import pytest

from vllm_watchdog.app.check_config import check

GOOD = f"""
[engines.primary]
command = [{json.dumps(sys.executable)}, "-m", "vllm_watchdog.sim"]
model = "a model"
port = 8100
gpus = [0]
api_key = "S3CRET"
max_concurrent = 32
max_concurrent_tokens = 100000
args = {{ max-num-seqs = 64, gpu-memory-utilization = 0.9, x-auth-token = "S3CRET" }}
[engines.backup]
backup_for = "primary"
port = 8101
args = {{ max-num-seqs = 16 }}
[thresholds]
vram_warn = 0.85
rss_gib = 8
rss_slope_mib_per_min = 5
[alerts.channels.oncall]
url = "https://example.com/S3CRET"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(text: str) -> tuple[int, str, str]:
    Path("config.toml").write_text(text)
    out, err = StringIO(), StringIO()
    return check(Path("config.toml"), out, err), out.getvalue(), err.getvalue()


def test_a_good_file_shows_each_engines_full_command_line() -> None:
    status, out, err = run(GOOD)
    assert (status, err) == (0, "")
    shown = [shlex.split(line) for line in out.splitlines() if "vllm_watchdog.sim" in line]
    for argv, port, seqs in zip(shown, ("8100", "8101"), ("64", "16"), strict=True):
        assert argv == [
            sys.executable, "-m", "vllm_watchdog.sim", "--model", "a model", "--host", "127.0.0.1", "--port", port,
            "--max-num-seqs", seqs, "--gpu-memory-utilization", "0.9", "--x-auth-token", "********",
        ]
    assert "engine backup, cold backup for primary: port 8101, GPU 0, log " in out


def test_thresholds_are_shown_as_they_hold_for_each_card_and_doubts_are_said() -> None:
    _, out, _ = run(GOOD)
    assert "GPU 0: engines take 0.9 of its memory, warn at 0.85, degrade over 0.975 for 120 s\n" in out
    assert ("primary: the gateway lets 32 requests and 100000 tokens of prompts through at a time, 0.5 of that to prompts "
            "of 8000 tokens or more\n") in out
    assert "when VRAM or KV cache of primary stay over them: the gateway lets 16 requests through at a time\n" in out
    assert "RSS of an engine: warn at 8 GiB\n" in out
    assert "warning: thresholds.vram_warn: 0.85 of GPU 0 is crossed as long as its engines take 0.9\n" in out


def test_a_backup_that_takes_as_many_requests_is_said_to_lower_nothing() -> None:
    _, out, _ = run(GOOD.replace("= 16", "= 64"))
    assert "stay over them: nothing but an alert, or failover: backup has no lower max-num-seqs\n" in out


def test_no_secret_is_shown() -> None:
    status, out, err = run(GOOD)
    assert status == 0
    assert "S3CRET" not in out + err
    assert "VLLM_API_KEY=********" in out


def test_an_address_that_apprise_does_not_know_is_told_without_it() -> None:
    assert run(GOOD + '[alerts.channels.team]\nurl = "nosuchthing://S3CRET"\n') == (
        2, "", "alerts.channels.team.url: Apprise does not know this address, see https://appriseit.com/services\n")


def test_the_kind_of_each_channel_is_shown() -> None:
    _, out, _ = run(GOOD + '[alerts.channels.team]\nurl = "dingtalk://SECx@S3CRET"\n')
    assert "alerts: oncall (webhook), team (dingtalk)" in out and "S3CRET" not in out


def test_a_bad_file_is_told_line_by_line_on_stderr_with_status_2() -> None:
    status, out, err = run(GOOD.replace("8101", "8100").replace("0.85", "85"))
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        'config.toml: thresholds.vram_warn: is 85, expected "auto" or a share of the card above 0, at most 1',
        "config.toml: engines.backup.port: 8100 is also engines.primary.port, expected a port of its own",
    ]


@pytest.mark.parametrize("text", [GOOD, GOOD.replace("8101", "8100"), "a ="])
def test_nothing_is_started_and_nothing_created(here: Path, text: str) -> None:
    run(text)
    assert [path.name for path in here.iterdir()] == ["config.toml"]


def test_without_a_file_the_usual_places_are_named() -> None:
    err = StringIO()
    assert check(None, StringIO(), err) == 2
    assert err.getvalue().startswith("config.toml: not there, nor is /etc/llm-watchdog/config.toml")


def test_a_variable_that_nearly_is_a_key_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_WATCHDOG_GATEWAY_LISTEN", "127.0.0.1:8000")
    status, out, _ = run(GOOD)
    assert status == 0
    assert "warning: LLM_WATCHDOG_GATEWAY_LISTEN is not read, did you mean LLM_WATCHDOG_GATEWAY__LISTEN?\n" in out
