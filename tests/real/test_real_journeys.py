"""One daemon, one real vLLM, broken again and again: the main job from launch to a clean stop, in this order.

Every test leaves an engine that serves to the next one; each start costs 35 seconds of both cores.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from math import sqrt
from threading import Thread

import pytest
from tests.real.conftest import Figures
from tests.real.rig import CONTEXT, HANG, START_S, RealWatchdog, Vllm, alive, crowd
from tests.system.harness import Doc, Receiver, free_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

LONGEST = CONTEXT - 100     # tokens of a prompt
KEPT = {"README.md", "timeline.jsonl", "log-tail.txt", "ps.txt", "engine.json", "samples.csv"}


@pytest.fixture(scope="module")
def phone() -> Iterator[Receiver]:
    """What the people on call receive."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def host(vllm: Vllm, phone: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWatchdog]:
    engines = {
        "primary": vllm.engine(),
        "backup": {"backup_for": "primary", "port": free_port(), "args": {"max-num-seqs": 1}},
    }
    made = RealWatchdog(tmp_path_factory.mktemp("host"), engines, hang=HANG, failover={"failback": "manual"},
                        channels={"oncall": {"url": phone.url}})
    made.start()
    yield made
    made.clear()


def incident_since(host: RealWatchdog, wall: float, class_: str) -> Doc:
    """The incident of this class that opened after `wall`."""
    def found() -> Doc | None:
        row = host.incident("primary")
        return row if row and row["class"] == class_ and row["wall_opened"] >= wall - 1 else None

    return host.until(found, f"no incident {class_}")


def evidence(host: RealWatchdog, row: Doc) -> set[str]:
    names = {path.name for path in host.bundle(row).iterdir()}
    assert names >= KEPT, f"missing: {KEPT - names}"
    return names


def judged(seen: set[tuple[str, str | None]]) -> str:
    """Every life and phase that was seen of an engine that runs: a suspicion may come, and must go."""
    return ", ".join(sorted({word for phase, life in seen if life for word in (phase, life)}))


def untroubled(host: RealWatchdog) -> tuple[int, list[str]]:
    """What a restart or an incident would change."""
    return host.engine("primary")["generation"], [row["id"] for row in host.words("incidents")[1]]


def calm(host: RealWatchdog) -> None:
    """Waits until the last incident is resolved: what breaks before that is a part of it."""
    host.until(lambda: not (host.status() or {"incidents": [1]})["incidents"], "the incident does not end", START_S)


def test_a_launch_reaches_ready_with_all_its_processes_known(host: RealWatchdog, figures: Figures) -> None:
    began = time.time()
    engine = host.up("primary")
    assert engine["generation"] == 1
    assert set(host.titled("primary")) == {"VLLM::EngineCore", "VLLM::Worker"}
    assert {os.getpgid(pid) for pid in host.of("primary")} == {engine["pid"]}
    assert host.complete("primary", 3) == 200
    code, doc = host.words("status")
    assert (code, doc["health"], doc["incidents"]) == (0, "healthy", [])
    assert len(doc["engines"][0]["tree"]["processes"]) == 4
    figures("launch -> ready", recovered_s=host.since(began - 2, "engine.ready"), note="4 processes, one group")


def test_a_killed_engine_core_is_noticed_and_replaced_although_vllm_exits_0(host: RealWatchdog, figures: Figures) -> None:
    core = host.core("primary")
    killed = time.time()
    os.kill(core, signal.SIGKILL)
    engine = host.up("primary", after=1)
    assert engine["failures"] == 1
    exited = host.settled("engine.exited")[-1]
    assert (exited["engine"], exited["code"]) == ("primary#1", "0") or exited["phase"] == "stopping", "it had its second"
    row = incident_since(host, killed, "engine_proc_died")
    files = evidence(host, row)
    first, *others = [died for _, died in host.events("MemberDied", "primary", killed, time.time())]
    assert (first["pid"], first["name"]) == (core, "VLLM::EngineCore")
    assert all(died["name"].startswith("VLLM::Worker") for died in others), "its workers may die with it"
    assert row["incident"]["findings"], "what vLLM itself says of it is lost"
    figures("SIGKILL of EngineCore", detected_s=host.since(killed, "engine.phase"), evidence=len(files),
            recovered_s=host.since(killed, "engine.ready", engine="primary#2"),
            note=f"exit code {exited['code']}, class {row['class']}")


def prefill(host: RealWatchdog, tokens: int) -> tuple[float, float, set[tuple[str, str | None]]]:
    """One prompt alone: how long it took, for how long of that no counter moved, and what the daemon thought of it."""
    served: list[int] = []
    prompt = (f"{tokens} " + "xyz " * (tokens // 4))[:tokens]       # begins like no other: nothing of it is cached
    client = Thread(target=lambda: served.append(host.complete("primary", 1, prompt, 400)))
    began, seen = time.time(), set()
    client.start()
    while client.is_alive():
        time.sleep(0.5)
        seen |= host.lives()
    ended = time.time()
    assert served == [200]
    return ended - began, host.frozen("primary", began, ended), seen


def test_a_long_prefill_that_moves_no_counter_is_never_taken_for_a_hang(host: RealWatchdog, figures: Figures) -> None:
    """How long a prompt takes differs tenfold between machines: it grows until nothing moved for long enough."""
    before = untroubled(host)
    wanted, tokens = sum(HANG.values()) + 3, 16_000
    took, frozen, seen = prefill(host, tokens)
    while frozen < wanted:
        assert tokens < LONGEST, f"no counter moved in {tokens} tokens for {frozen:.0f} s only: this proves nothing"
        growth = sqrt(1.5 * wanted / took)      # attention costs the square; half as much again, for one more try to suffice
        tokens = min(LONGEST, int(tokens * min(4.0, max(1.2, growth))))
        took, frozen, seen = prefill(host, tokens)
    assert untroubled(host) == before
    figures(f"prefill of {tokens:,} tokens", note=f"no counter moved for {frozen:.0f} s; not restarted, {judged(seen)}")


def test_the_next_daemon_adopts_what_a_killed_one_left(host: RealWatchdog, figures: Figures) -> None:
    before = host.up("primary")
    host.kill()
    assert host.cli("status").code == 4
    assert host.complete("primary", 1) == 200
    began = time.time()
    host.start()
    after = host.up("primary")
    assert (after["pid"], after["generation"]) == (before["pid"], before["generation"])
    known = time.time() - began
    assert host.complete("primary", 1) == 200
    assert not [line for line in host.settled("engine.spawned") if line["engine"] == "primary#3"]
    figures("kill -9 of the daemon, engine serving", detected_s=host.since(began, "engine.adopted"),
            recovered_s=known, note="adopted as it served, same PID")


def test_an_operators_restart_survives_the_daemon_and_forgives(host: RealWatchdog, figures: Figures) -> None:
    asked = time.time()
    said = host.cli("restart", "primary")
    assert said.code == 0, said
    loading = host.loading("primary", after=2)
    host.kill()
    host.start()
    engine = host.up("primary", after=2)
    assert (engine["generation"], engine["pid"], engine["failures"]) == (3, loading["pid"], 0)
    figures("operator's restart, daemon killed while it loads", recovered_s=host.since(asked, "engine.phase", now="serving"),
            note="adopted while loading, failures forgiven")


def test_a_killed_api_server_leaves_no_orphan_and_is_replaced(host: RealWatchdog, figures: Figures) -> None:
    calm(host)
    members, leader = host.of("primary"), host.engine("primary")["pid"]
    killed = time.time()
    os.kill(leader, signal.SIGKILL)
    host.up("primary", after=3)
    assert not alive(members)
    ended = host.settled("engine.emptied")[-1]
    assert "VLLM::EngineCor" in ended["killed"]     # the kernel keeps 15 characters of a name
    gone_s = host.since(killed, "engine.emptied", engine="primary#3")
    assert gone_s < host.since(killed, "engine.spawned", engine="primary#4")
    row = incident_since(host, killed, "unexpected_exit")
    figures("SIGKILL of the API server", detected_s=host.since(killed, "engine.exited"), evidence=len(evidence(host, row)),
            recovered_s=host.since(killed, "engine.ready", engine="primary#4"),
            note=f"orphans gone after {gone_s:.2f} s")


def test_32_long_requests_on_two_seats_are_busy_and_never_restarted(host: RealWatchdog, figures: Figures) -> None:
    before = untroubled(host)
    began, seen, queue = time.time(), set(), 0.0
    with crowd(host.url("primary"), 32, 30_000):
        while time.time() - began < 24 or queue < 30:
            time.sleep(1)
            seen |= host.lives()
            queue = max(queue, host.metric("primary", "vllm:num_requests_waiting"))
            assert time.time() - began < 90, "32 requests never queue"
    assert untroubled(host) == before
    host.until(lambda: host.metric("primary", "vllm:num_requests_waiting") == 0, "the queue does not end with its clients")
    figures("32 long requests, 2 seats, 24 s", note=f"not restarted; {queue:.0f} waiting, judged {judged(seen)}")


def test_a_stopped_engine_core_is_wedged_and_the_second_failure_goes_to_the_backup(
    host: RealWatchdog, figures: Figures
) -> None:
    calm(host)
    members, core = host.of("primary"), host.core("primary")
    stopped = time.time()
    os.kill(core, signal.SIGSTOP)
    host.up("backup")
    assert not alive(members)
    given_up = stopped + host.since(stopped, "engine.phase", now="dumping")
    health = {event["health"] for _, event in host.events("Probed", "primary", stopped, given_up)}
    assert "ok" in health and health <= {"ok", "silent"}, f"/health showed this hang, so it proves nothing: {health}"
    row = incident_since(host, stopped, "engine_hang")
    files = evidence(host, row)
    stacks = (host.bundle(row) / "stacks.txt").read_text()
    assert f"PID {core}" in stacks and "run_busy_loop" in stacks, stacks[:2000]
    code, doc = host.words("status")
    assert (code, doc["health"], doc["services"][0]["serving"]) == (1, "degraded", "backup")
    assert host.complete("backup", 1) == 200
    figures("SIGSTOP of EngineCore, /health 200", detected_s=host.since(stopped, "engine.phase", now="dumping"),
            evidence=len(files), recovered_s=host.since(stopped, "engine.ready", engine="backup#1"),
            note="wedged, stacks saved, second failure: the cold backup serves")


def test_failback_returns_to_the_primary(host: RealWatchdog, figures: Figures) -> None:
    asked = time.time()
    said = host.cli("failback")
    assert said.code == 0, said
    engine = host.up("primary", after=4)
    assert engine["failures"] == 0
    assert not host.of("backup")
    figures("operator's failback", recovered_s=host.since(asked, "engine.ready", engine="primary#5"),
            note="the backup stopped first")


def test_a_killed_worker_is_named_and_the_engine_replaced(host: RealWatchdog, figures: Figures) -> None:
    calm(host)
    members, worker = host.of("primary"), host.titled("primary")["VLLM::Worker"]
    killed = time.time()
    os.kill(worker, signal.SIGKILL)
    host.up("primary", after=5)
    assert not alive(members) and not host.of("backup")
    row = incident_since(host, killed, "worker_died")
    files = evidence(host, row)
    _, died = next(host.events("MemberDied", "primary", killed, time.time()))
    assert died["pid"] == worker
    figures("SIGKILL of the worker", detected_s=host.since(killed, "engine.phase"), evidence=len(files),
            recovered_s=host.since(killed, "engine.ready", engine="primary#6"), note=f"class {row['class']}")


def test_people_were_told_once_when_each_incident_opened_and_once_when_it_ended(
    host: RealWatchdog, phone: Receiver, figures: Figures
) -> None:
    calm(host)
    owed = {(row["id"], kind) for row in host.words("incidents")[1] for kind in ("opened", "resolved")}
    assert len(owed) == 8
    host.until(lambda: len(phone.letters) >= len(owed), "an alert is missing")
    assert sorted((letter["incident"], letter["kind"]) for letter in phone.letters) == sorted(owed)
    figures("alerts", note=f"{len(owed) // 2} incidents, {len(phone.letters)} messages, across two daemons' deaths")


def test_a_clean_stop_leaves_nothing_and_is_no_incident(host: RealWatchdog, figures: Figures) -> None:
    _, before = host.words("incidents")
    asked = time.time()
    host.finish()       # exit code 0; no process, port, socket or lock left; the journal replays
    took = time.time() - asked
    assert [row["id"] for row in host.words("incidents")[1]] == [row["id"] for row in before]
    figures("clean stop, serving", recovered_s=host.since(asked, "engine.emptied", engine="primary#6"),
            note=f"daemon gone after {took:.1f} s with a replay; no process, port, lock, incident")


def test_a_stop_in_the_middle_of_a_failover_leaves_nothing_and_is_no_incident(host: RealWatchdog, figures: Figures) -> None:
    _, before = host.words("incidents")
    host.start()
    host.loading("primary", after=6)
    asked = time.time()
    assert host.cli("failover").code == 0
    host.loading("backup", after=1)
    left_s = host.since(asked, "engine.emptied", engine="primary#7")
    stopped = time.time()
    host.finish()
    assert [row["id"] for row in host.words("incidents")[1]] == [row["id"] for row in before]
    figures("failover while loading, stop while loading", detected_s=left_s,
            recovered_s=host.since(stopped, "engine.emptied", engine="backup#2"), note="from TERM to no process left, twice")
