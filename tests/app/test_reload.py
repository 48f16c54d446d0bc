"""What of a new configuration counts at once, what waits, and that an invalid one changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.app.test_announce import Systemd

from vllm_watchdog.app.announce import Announcer
from vllm_watchdog.app.reload import Changes, Reload, changes
from vllm_watchdog.config import Settings
from vllm_watchdog.config_load import load
from vllm_watchdog.core.events import Survivor
from vllm_watchdog.core.plan import Plan
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.launch import fingerprint

Read = Callable[..., Settings]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """The settings of two engines, with these keys over them: `engines.a.port`, `hang.still_s`."""
    monkeypatch.chdir(tmp_path)

    def one(**over: object) -> Settings:
        base = {"engines.a.command": [sys.executable], "engines.a.model": "m", "engines.a.port": 8100,
                "engines.a.args": {"max-num-seqs": 64}, "engines.b.backup_for": "a", "engines.b.port": 8101}
        tree: dict[str, object] = {}
        for path, value in (base | over).items():
            *folders, last = path.split(".")
            at = tree
            for folder in folders:
                at = at.setdefault(folder, {})  # type: ignore[assignment]
            at[last] = value
        return Settings(**tree)  # type: ignore[arg-type]

    return one


def between(was: Settings, now: Settings) -> Changes:
    return changes(was, dict.fromkeys(was.engines, was), now)


def test_thresholds_and_limits_are_no_matter_of_a_start(read: Read) -> None:
    now = read(**{"hang.still_s": 3, "engines.a.stop_timeout_s": 9, "thresholds.kv_cache": 0.5})
    assert between(read(), now) == Changes()
    assert between(read(), now).told() == "thresholds, limits, rules and alerts are applied"


def test_arguments_wait_for_the_next_start_of_each_engine_that_has_them(read: Read) -> None:
    found = between(read(), read(**{"engines.a.args": {"max-num-seqs": 32, "enforce-eager": True},
                                    "engines.a.api_key": "secret"}))
    keys = ("args.enforce-eager", "args.max-num-seqs", "api_key")
    assert dict(found.pending) == {"a": keys, "b": keys}, "a backup inherits them"
    assert found.told() == (
        "thresholds, limits, rules and alerts are applied; a gets args.enforce-eager, args.max-num-seqs, api_key at its "
        "next start (llm-watchdog restart a); b gets args.enforce-eager, args.max-num-seqs, api_key at its next start "
        "(llm-watchdog restart b)")


def test_rules_are_applied_unless_they_name_an_engine_that_this_daemon_does_not_run(read: Read) -> None:
    rules = [{"engine": "a", "prompt_tokens_min": 8000}]
    assert between(read(), read(**{"gateway.rules": rules, "gateway.keys": {"batch": "secret"}})) == Changes()
    other = {"engines.c.model": "m", "engines.c.port": 9001, "gateway.rules": [{"engine": "c"}]}
    assert between(read(), read(**other)).fixed == ("engines.c", "gateway.rules")


def test_ports_folders_and_other_engines_wait_for_the_daemon(read: Read) -> None:
    now = read(**{"engines.a.port": 9000, "engines.a.args": {}, "daemon.sample_s": 2.0,
                  "engines.c.model": "m", "engines.c.port": 9001, "gateway.hold_s": 1})
    found = between(read(), now)
    assert found.fixed == ("daemon.sample_s", "engines.c", "engines.a.port", "engines.a.args.max-num-seqs")
    assert found.stuck == {"a", "c"} and found.gateway
    assert [name for name, _ in found.pending] == ["b"]
    assert found.told().endswith("after a restart of the daemon; gateway: after a restart of the gateway")


class Stage:
    def __init__(self, began: Settings) -> None:
        self.next: Settings | None = None
        self.applied: list[tuple[Settings, Plan]] = []
        self.said: list[str] = []
        self.running = began.plan(seed=5)
        self.reload = Reload(began, self.again, lambda: self.running, lambda *what: self.applied.append(what),
                             Announcer(Systemd(), "watching", lambda: 0.0), lambda name, **_: self.said.append(name))

    def again(self) -> Settings:
        return self.next or load(Path("/no/such/config.toml"), {})


def test_an_invalid_file_changes_nothing_and_says_why(read: Read) -> None:
    stage = Stage(read())
    ok, text = stage.reload()
    assert not ok and text == ("nothing was changed:\n/no/such/config.toml: No such file or directory, "
                               "expected a readable TOML file")
    assert not stage.applied and stage.reload.report() == {"pending": {}, "fixed": []}
    assert stage.said == ["config.refused"]


def test_an_engine_starts_by_what_is_pending_once(read: Read) -> None:
    stage = Stage(read())
    stage.next = read(**{"engines.a.args": {"max-num-seqs": 32}})
    assert stage.reload()[0]
    assert stage.reload.report()["pending"] == {"a": ["args.max-num-seqs"], "b": ["args.max-num-seqs"]}
    assert stage.reload.profile("a")["max-num-seqs"] == 64, "as it runs"
    launch = stage.reload.start_of("a")
    assert launch and launch.argv[-2:] == ("--max-num-seqs", "32")
    assert (stage.reload.profile("a")["max-num-seqs"], stage.reload.profile("b")["max-num-seqs"]) == (32, 64)
    assert stage.reload.start_of("a") is None
    assert stage.reload.report()["pending"] == {"b": ["args.max-num-seqs"]}
    assert stage.reload()[0], "the same file again"
    assert stage.reload.report()["pending"] == {"b": ["args.max-num-seqs"]}
    stage.next = read()
    stage.reload()
    assert stage.reload.report()["pending"] == {"a": ["args.max-num-seqs"]}, "back: now it is a that has the other ones"


def test_an_engine_that_moved_is_left_out_of_the_plan_and_the_levels_stay(read: Read) -> None:
    stage = Stage(read(**{"engines.a.gpus": [0]}))
    stage.next = read(**{"engines.a.gpus": [1], "hang.still_s": 3})
    stage.reload()
    plan = stage.applied[0][1]
    assert plan.engines == () and plan.seed == 5
    assert plan.thresholds.vram_warn == stage.running.thresholds.vram_warn
    assert stage.reload.start_of("a") is None


def test_an_adopted_engine_that_was_started_otherwise_waits_for_its_next_start(read: Read) -> None:
    stage = Stage(read(**{"engines.a.args": {"max-num-seqs": 32}}))
    before = read().launches()
    stage.reload.adopt((
        Survivor(Mark("a", 3), 7, True, 1.0, fingerprint(before["a"])), Survivor(Mark("b", 1), 8, True, 1.0, ""),
        Survivor(Mark("gone", 1), 9, True, 1.0, "x")))
    other = ["settings that changed before this daemon"]
    assert stage.reload.report()["pending"] == {"a": other}
    stage.next = read(**{"engines.a.args": {"max-num-seqs": 32}})
    stage.reload()
    assert stage.reload.report()["pending"] == {"a": other}, "a reload does not make it true"
    launch = stage.reload.start_of("a")
    assert launch and launch.argv[-1] == "32"
    stage.reload()
    assert stage.reload.report()["pending"] == {}


def test_an_adopted_engine_that_was_started_alike_waits_for_nothing(read: Read) -> None:
    stage = Stage(read())
    launches = read().launches()
    stage.reload.adopt(tuple(Survivor(Mark(name, 1), 7, True, 1.0, fingerprint(launches[name])) for name in launches))
    assert stage.reload.report()["pending"] == {}
