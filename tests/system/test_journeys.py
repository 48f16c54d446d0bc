"""What happens to one engine, and what the watchdog makes of it: one daemon, one service for each kind of trouble."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from tests.system.harness import Receiver, Watchdog, engine

BUDGET = 2


@pytest.fixture(scope="module")
def stranger() -> Iterator[socket.socket]:
    """Somebody else's server, on a port that an engine is meant to have."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, stranger: socket.socket) -> Iterator[Watchdog]:
    watchdog = Watchdog(
        tmp_path_factory.mktemp("journeys"),
        {
            "core": engine(),
            "api": engine(args={"tensor-parallel-size": 2}),
            "oom": engine(sim={"oom_over_tokens": 100}),
            "flag": engine(args={"no-such-flag": True}),
            "kv": engine(sim={"fail_start": "kv-never-fits"}),
            "model": engine(sim={"fail_start": "bad-model"}),
            "taken": engine(stranger.getsockname()[1]),
            "stubborn": engine(sim={"ignore_term": True}, stop_timeout_s=0.8),
            "linger": engine(sim={"linger": True}, stop_timeout_s=0.8),
            "crash": engine(sim={"die_with": "SIGSEGV"}),
        },
        restart={"budget": BUDGET},
        hang={"dead_s": 1.0},
        channels={"oncall": {"url": receiver.url}},
    )
    yield watchdog.start()
    watchdog.finish()


def test_an_engine_is_launched_and_serves(host: Watchdog) -> None:
    doc = host.serving("core")
    assert doc["generation"] == 1
    assert host.prompt("core") == 200
    said = [line["say"] for line in host.settled("engine.") if line.get("engine") == "core#1"]
    assert {"engine.spawned", "engine.ready"} <= set(said)


def test_out_of_memory_on_a_long_prompt_is_classified_with_its_bytes_and_answered_by_a_restart(host: Watchdog) -> None:
    host.engine_when("oom", lambda doc: doc["phase"] == "serving" and doc["tree"], "not sampled while it serves")
    assert host.prompt("oom", words=200) == 500
    host.serving("oom", after=1)
    row = host.until(lambda: host.incident("oom"), "no incident")
    assert row["class"] == "oom_runtime"
    details = dict(row["incident"]["findings"][0]["details"])
    assert details["requested_bytes"] == 352 << 20, details
    exited = next(line for line in host.settled("engine.exited") if line["engine"] == "oom#1")
    assert exited["code"] == "0"        # vLLM calls its engine's death a success


def test_the_incident_folder_holds_what_the_night_shift_needs(host: Watchdog) -> None:
    row = host.until(lambda: host.incident("oom"), "no incident")
    folder = host.bundle(row)
    expected = {"README.md", "timeline.jsonl", "log-tail.txt", "gpu-processes.json", "ps.txt", "kernel.txt", "cgroup.txt",
                "engine.json", "samples.csv"}
    host.until(lambda: expected <= {path.name for path in folder.iterdir()}, "the page is written by a thread of its own")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    page = (folder / "README.md").read_text("utf-8")
    assert "oom_runtime" in page and "352.00 MiB" in page and "--max-num-seqs" in page
    assert "CUDA out of memory" in (folder / "log-tail.txt").read_text("utf-8")
    facts = json.loads((folder / "engine.json").read_text("utf-8"))
    assert facts["generation"] == 1 and "--sim-oom-over-tokens" in facts["command"] and facts["version"] == "0.32.0"
    head, *rows = (folder / "samples.csv").read_text("utf-8").splitlines()
    assert head.startswith("time,engine,generation,phase,rss_bytes") and any(",oom,1," in row for row in rows)

    def told() -> list[str]:
        return [json.loads(line)["what"] for line in (folder / "timeline.jsonl").read_text("utf-8").splitlines()]

    host.until(lambda: "started" in told(), "the page follows the incident")
    assert told()[0] == "opened"


def test_a_killed_engine_core_is_noticed_and_replaced(host: Watchdog) -> None:
    host.serving("core")
    core = host.core("core")
    killed = time.monotonic()
    os.kill(core, signal.SIGKILL)
    host.serving("core", after=1)
    events = (json.loads(line).get("event", {}) for line in host.lines())
    ends = (event for event in events if event.get("_") in ("MemberDied", "Exited"))
    died = next(event for event in ends if event["mark"]["engine"] == "core")
    if died["_"] == "MemberDied":       # on a busy machine the API server may have ended too before anybody looks
        assert (died["pid"], died["name"]) == (core, "VLLM::EngineCore")
    left = next(line for line in host.settled("engine.phase") if (line["engine"], line["was"]) == ("core#1", "serving"))
    assert killed <= left["at"] <= died["at"] + 0.001, "by its end, or what it wrote before; not later"
    row = host.until(lambda: host.incident("core"), "no incident")
    assert row["class"] != "unexpected_exit", "the log says what happened"
    assert host.bundle(row).is_dir()


def test_a_killed_api_server_leaves_no_orphan(host: Watchdog) -> None:
    first = host.serving("api")
    before = host.of("api")
    assert len(before) == 4         # API server, EngineCore, two workers
    os.kill(first["pid"], signal.SIGKILL)
    host.serving("api", after=1)
    assert not set(before) & set(host.of("api"))
    emptied = next(line for line in host.settled("engine.emptied") if line["engine"] == "api#1")
    assert "VLLM::EngineCor" in emptied["killed"], emptied
    row = host.until(lambda: host.incident("api"), "no incident")
    assert row["class"] == "unexpected_exit"


@pytest.mark.parametrize("name,class_,words", [
    ("flag", "bad_args", "no-such-flag"),
    ("kv", "startup_kv_insufficient", "KV cache"),
    ("model", "model_not_found", "not a local folder"),
])
def test_what_another_try_cannot_cure_is_held_after_one_try(host: Watchdog, name: str, class_: str, words: str) -> None:
    doc = host.in_phase(name, "held")
    assert doc["generation"] == 1 and doc["cause"] == class_ and words in doc["why"], doc
    row = host.until(lambda: host.incident(name, urgency="page"), "nobody was paged")
    assert any("held: another try would fail alike" in entry["text"] for entry in row["incident"]["timeline"])


def test_a_stranger_on_the_port_is_named_and_left_alone(host: Watchdog, stranger: socket.socket) -> None:
    doc = host.in_phase("taken", "held")
    assert doc["cause"] == "port_stranger" and f"PID {os.getpid()}" in doc["why"], doc
    stranger.close()
    assert host.ask("restart", engine="taken")["ok"]
    host.serving("taken")


def test_an_engine_that_ignores_term_is_killed_and_its_planned_stop_is_no_incident(host: Watchdog) -> None:
    host.serving("stubborn")
    before = host.of("stubborn")
    assert host.ask("restart", engine="stubborn")["ok"]
    host.serving("stubborn", after=1)
    assert not set(before) & set(host.of("stubborn"))
    phases = [line["now"] for line in host.settled("engine.phase") if line["engine"] == "stubborn#1"]
    assert "stopping,killing,settling,releasing" in ",".join(phases)
    assert host.incident("stubborn") is None


def test_an_api_server_that_lingers_after_its_engine_died_is_replaced(host: Watchdog) -> None:
    first = host.serving("linger")
    host.fault("linger", "core_death")
    host.serving("linger", after=1)
    assert first["pid"] not in host.of("linger")


def test_an_engine_that_dies_at_once_again_and_again_is_held_out_loud(host: Watchdog, receiver: Receiver) -> None:
    doc = host.in_phase("crash", "held")
    assert doc["generation"] == BUDGET + 1 and doc["failures"] == BUDGET + 1
    row = host.until(lambda: host.incident("crash", urgency="page"), "nobody was paged")
    sentence = f"crash is held: {BUDGET + 1} failures within 3600 s, {BUDGET} are allowed"
    assert any(sentence in entry["text"] for entry in row["incident"]["timeline"])
    host.until(lambda: receiver.of("crash", urgency="page"), "no page came")
    assert len(receiver.of("crash", kind="opened")) == 1
    page, = receiver.of("crash", urgency="page")
    assert sentence in page["text"], "the page says why"


def test_held_engines_stay_held_and_the_others_go_on_serving(host: Watchdog) -> None:
    doc = host.until(host.status, "no status")
    phases = {each["name"]: each["phase"] for each in doc["engines"]}
    held = {"flag", "kv", "model", "crash"}
    assert {name for name, phase in phases.items() if phase == "held"} == held
    assert {name for name, phase in phases.items() if phase == "serving"} == set(phases) - held
