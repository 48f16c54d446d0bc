"""Secrets planted wherever one can be given are in nothing that a daemon writes, prints or shows while engines fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.receivers import Server
from tests.system.harness import HASTY, Watchdog, engine, free_port

from vllm_watchdog.procfs import read

pytestmark = pytest.mark.slow

SECRETS = {name: f"s3cr3t-{name}-0123456789" for name in (
    "apikey", "hftoken", "argurl", "userinfo", "path", "header", "signature", "apprise", "apprisepath", "query", "daemonenv",
    "routing", "password")}
S = SECRETS


def refuses(handler: object) -> None:
    """Says no, and repeats what it was sent, as some do."""
    text = f"no: {handler.path} {dict(handler.headers)} {handler.body[:300]!r}".encode()  # type: ignore[attr-defined]
    handler.send_response(403)  # type: ignore[attr-defined]
    handler.send_header("Content-Length", str(len(text)))  # type: ignore[attr-defined]
    handler.end_headers()  # type: ignore[attr-defined]
    handler.wfile.write(text)  # type: ignore[attr-defined]


@pytest.fixture
def refusing() -> Iterator[Server]:
    server = Server(refuses)
    yield server
    server.close()


def test_no_planted_secret_is_in_anything_that_was_written_or_shown(tmp_path: Path, refusing: Server) -> None:
    at = f"127.0.0.1:{refusing.port}"
    args = {"otlp-traces-endpoint": f"http://me:{S['argurl']}@collector:4317"}
    watchdog = Watchdog(
        tmp_path, {"one": engine(api_key=S["apikey"], args=args,
                                 env={"HF_TOKEN": S["hftoken"], "PROXY_PASSWORD": S["password"]})},
        env={"LLM_WATCHDOG_ALERTS__CHANNELS__FROMENV__URL": f"http://{at}/{S['daemonenv']}", "HF_TOKEN": S["hftoken"]},
        program=HASTY, channels={
            "hook": {"url": f"http://u:{S['userinfo']}@{at}/{S['path']}?token={S['query']}", "secret": S["signature"],
                     "headers": {"Authorization": f"Bearer {S['header']}"}},
            "ding": {"type": "dingtalk", "secret": S["signature"],
                     "url": f"http://{at}/robot/send?access_token={S['query']}"},
            "pager": {"type": "pagerduty", "url": f"http://{at}/v2/enqueue", "secret": S["routing"]},
            "mail": {"url": f"json://u:{S['apprise']}@{at}/{S['apprisepath']}"},
            "nowhere": {"url": f"mailto://u:{S['apprise']}@127.0.0.1:{free_port()}/?to=a@example.com&from=b@example.com"},
        })
    shown: list[str] = []
    try:
        watchdog.start().serving("one")
        watchdog.fault("one", "oom")
        names = {"hook", "ding", "pager", "mail", "nowhere", "fromenv"}
        watchdog.until(lambda: names == {line["channel"] for line in watchdog.said("alert.failed")}, "not all were tried")
        watchdog.serving("one", after=1)
        row = watchdog.until(lambda: watchdog.incident("one"), "no incident")
        watchdog.bundle(row)
        assert watchdog.daemon
        shown.append(read(watchdog.daemon.pid, "cmdline").decode())
        assert "--config" in shown[0]
        for words in (["status"], ["status", "--json"], ["incidents"], ["incidents", row["id"]], ["check-config"],
                      ["alert", "test", "ding"], ["alert", "test", "mail"], ["alert", "test", "nowhere"], ["snapshot"]):
            said = watchdog.cli(*words)
            shown += [said.out, said.err]
        assert "holds a URL with a password" in "".join(shown)
        assert "FAILING since" in "".join(shown) and "NOT TAKEN" in "".join(shown)
    finally:
        watchdog.finish()
    written = [path for folder in (watchdog.logs, watchdog.state) for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 10
    # What stands in an engine's command line, the engine itself writes into its log; check-config warns of it.
    leaks = [(name, str(path)) for path in (*written, watchdog.output) for name, secret in SECRETS.items()
             if secret.encode() in path.read_bytes() and (name, path.name) != ("argurl", "one.log")]
    leaks += [(name, text[:200]) for text in shown for name, secret in SECRETS.items() if secret in text]
    assert not leaks
