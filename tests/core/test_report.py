from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest
from tests.core.scenes import GIB, WALL, Scene, finding, gpu, host, mark, metrics, plan, tree

from vllm_watchdog.core import events as e
from vllm_watchdog.core.leaks import Growth
from vllm_watchdog.core.plan import Plan, Thresholds
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import Unknown
from vllm_watchdog.core.report import headline, report, serving
from vllm_watchdog.core.units import DAY_S
from vllm_watchdog.core.world import World

M = mark("primary#1")


def told(scene: Scene) -> dict[str, object]:
    document = report(scene.world)
    json.dumps(document, allow_nan=False)
    return document


def engine(scene: Scene, name: str = "primary") -> dict[str, object]:
    return next(one for one in told(scene)["engines"] if one["name"] == name)


# -- health

def test_a_service_that_serves_as_configured_is_healthy() -> None:
    document = told(Scene(plan()).serve())
    assert (document["health"], document["paused"], document["stopping"]) == ("healthy", False, False)
    assert document["services"] == [{
        "name": "primary", "side": "primary", "wanted": "primary", "serving": "primary", "port": 8100, "since": WALL,
        "lowered": None}]


def test_a_service_that_does_not_serve_is_down() -> None:
    scene = Scene(plan())
    assert told(scene)["health"] == "down" and told(scene)["services"][0]["serving"] is None


def test_before_anything_is_configured_nothing_serves() -> None:
    assert report(World(plan=Plan()))["health"] == "down"


def test_a_service_on_its_backup_is_degraded() -> None:
    scene = Scene(plan()).serve()
    scene.ask("failover")
    scene.crash()
    scene.serve("backup")
    document = told(scene)
    assert document["health"] == "degraded"
    assert document["services"][0] | {"since": 0} == {
        "name": "primary", "side": "backup", "wanted": "backup", "serving": "backup", "port": 8101, "since": 0,
        "lowered": None}


def test_a_pause_is_degraded() -> None:
    scene = Scene(plan()).serve()
    scene.ask("pause")
    assert (told(scene)["health"], told(scene)["paused"]) == ("degraded", True)


def test_a_suspect_is_degraded_but_keeps_the_route() -> None:
    scene = Scene(plan()).serve()
    scene.scrape(1, at=1.0)
    scene.at(10.0)
    scene.feed(e.Answered(20.0, M, False, 10.0))
    assert scene.phase() is Phase.SUSPECT
    assert (told(scene)["health"], serving(scene.world, scene.world.services[0])) == ("degraded", "primary")
    assert engine(scene)["life"] == "quiet"


@pytest.mark.parametrize(("class_", "health"), [("shm_stall", "healthy"), ("port_stranger", "degraded")])
def test_an_urgent_incident_is_degraded_and_a_warning_is_not(class_: str, health: str) -> None:
    from vllm_watchdog.core.readings import Health, Holder

    scene = Scene(plan()).serve()
    if class_ == "shm_stall":
        scene.feed(e.LogRead(5.0, M, (finding(class_),)))
    else:
        scene.feed(e.Probed(5.0, M, Health.OK, (Holder(7, "nginx"),)))
    document = told(scene)
    assert document["health"] == health
    (incident,) = document["incidents"]
    assert incident["class"] == class_ and incident["service"] == "primary" and incident["opened"] == WALL + 5
    assert set(incident) == {"id", "service", "class", "urgency", "text", "text_zh", "waits_for", "opened"}


def test_a_service_that_is_lowered_is_degraded_and_says_since_when_and_why() -> None:
    scene = Scene(plan(seqs=64, backup_seqs=16)).serve()
    for at in range(10, 131, 10):
        scene.scrape(at, at=float(at), kv=0.99, waiting=5.0)
    document = told(scene)
    assert document["health"] == "degraded"
    assert document["services"][0]["lowered"] == {"to": 16, "since": WALL + 130, "why": "kv_pressure of primary",
                                                   "why_zh": "primary 的 kv_pressure"}


# -- engines

def test_an_engine_is_told_whole() -> None:
    scene = Scene(plan()).serve()
    scene.feed(e.Scraped(4.0, M, metrics(3, running=2.0, waiting=1.0, kv=0.5)))
    scene.feed(e.HostSampled(5.0, host(), (tree(M, 2, cpu=0.123),)))
    seen = engine(scene)
    assert {name: seen[name] for name in ("phase", "generation", "pid", "port", "gpus", "backup_for", "wanted")} == {
        "phase": "serving", "generation": 1, "pid": 100, "port": 8100, "gpus": [], "backup_for": None, "wanted": True}
    told_too = ("since", "ready", "next_try", "life", "health", "probe", "failures", "cause", "why", "waits", "waits_zh",
                "doubt", "doubt_zh")
    assert {name: seen[name] for name in told_too} == {
        "since": WALL, "ready": WALL, "next_try": None, "life": "alive", "health": "ok", "probe": "ok", "failures": 0,
        "cause": "", "why": "", "waits": None, "waits_zh": None, "doubt": None, "doubt_zh": None}
    assert seen["metrics"] == {"running": 2.0, "waiting": 1.0, "kv_usage": 0.5, "preemptions": 0.0, "counters": True,
                               "generation_tokens": 3}
    assert seen["tree"] == {"rss_bytes": 2 * GIB, "charged_bytes": None, "cpu": 0.12, "processes": [
        {"pid": 100, "name": "vllm", "rss_bytes": 2 * GIB, "uss_bytes": None, "cpu": 0.123, "threads": 8, "fds": 20,
         "fd_limit": None}]}
    assert seen["growth"] == []


def test_a_start_that_waits_says_for_whose_memory_beside_what_failed_before() -> None:
    scene = Scene(plan(backup=False, gpus=(0,), share=0.8))
    assert engine(scene)["waits"] is None, "no sample has come: that is a matter of a moment"
    scene.gpus(1.0, gpu(1))
    scene.serve()
    scene.crash("primary", 6.0)
    scene.gpus(7.0, gpu(52, (4711, "python3", None, 51.5)))
    seen = engine(scene)
    assert (seen["phase"], seen["cause"]) == ("releasing", "unexpected_exit")
    assert seen["waits"] == "GPU 0 lacks 33.0 GiB, held by PID 4711 (python3) 51.5 GiB"
    assert seen["waits_zh"] == "GPU 0 还缺 33.0 GiB，占用者：PID 4711 (python3) 51.5 GiB"
    scene.gpus(8.0, gpu(1))
    assert engine(scene)["waits"] is None


def test_a_suspect_is_told_with_why_and_how_long_it_has() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.scrape(1, at=1.0)
    scene.at(10.0)
    scene.feed(e.Answered(20.0, M, False, 10.0))
    scene.at(30.0)
    seen, why = engine(scene), "no token for 30 s: the counters stand still and a one-token request is not answered"
    assert (seen["phase"], seen["doubt"]) == ("suspect", f"{why}; it is taken for hung in 50 s unless it moves")
    assert seen["doubt_zh"].endswith("若仍无进展，50 秒后判定为卡死")
    scene.ask("pause")
    assert engine(scene)["doubt"] == why, "while paused it is only watched"
    scene.ask("resume")
    scene.feed(e.Answered(31.0, M, True, 1.0))
    assert engine(scene)["doubt"] is None


def test_how_fast_an_engine_grows_is_told_while_it_runs() -> None:
    scene = Scene(plan(backup=False)).serve()
    slow = Growth("rss", "EngineCore (PID 7)", "the host's 64.0 GiB are", 60 * 2**30, 2**20, 2**20, 1.0)
    flat = Growth("fds", "API server (PID 8)", "its limit of 1024 is", 1000, 0.0, 0.0, 1.0)
    world = scene.world.with_engine(replace(scene.engine(), growths=(slow, flat)))
    (told_slow, told_flat) = report(world)["engines"][0]["growth"]
    assert told_slow == {
        "what": "rss", "class": "rss_leak", "who": "EngineCore (PID 7)", "per_min": 60.0,
        "unit": "MiB", "eta_s": 61440, "leaks": True,
        "text": "60 MiB a minute: the host's 64.0 GiB are reached in about 17 h",
        "text_zh": "每分钟增长 60 MiB：约 17 h后达到the host's 64.0 GiB are"}
    assert (told_flat["eta_s"], told_flat["leaks"], told_flat["unit"]) == (None, False, "files")
    scene.world = world
    scene.crash("primary", 6.0)
    assert engine(scene)["growth"] == []


def test_an_engine_without_a_process_has_no_figures() -> None:
    seen = engine(Scene(plan(gpus=(0,))), "backup")
    assert (seen["pid"], seen["ready"], seen["life"], seen["health"], seen["tree"]) == (None, None, None, None, None)
    assert (seen["backup_for"], seen["gpus"], seen["metrics"]) == ("primary", [0], {"unknown": "no process"})


def test_what_a_dead_engine_last_published_is_not_told_as_if_it_were_now() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.feed(e.Scraped(4.0, M, metrics(3)))
    scene.feed(e.HostSampled(5.0, host(), (tree(M),)))
    scene.crash("primary", 6.0)
    scene.serve()
    scene.crash("primary", 7.0)
    seen = engine(scene)
    assert scene.phase() is Phase.BACKOFF
    assert (seen["metrics"], seen["tree"], seen["pid"]) == ({"unknown": "no process"}, None, None)
    assert seen["next_try"] == pytest.approx(scene.engine().life.deadline + WALL, abs=0.001)
    assert (seen["failures"], seen["cause"]) == (2, "unexpected_exit")


def test_counters_that_are_not_published_are_said_to_be_missing() -> None:
    scene = Scene(plan()).serve()
    scene.scrape(None, at=1.0)
    assert engine(scene)["metrics"]["counters"] is False
    scene.feed(e.Scraped(2.0, M, Unknown(2.0, "refused")))
    assert engine(scene)["metrics"] == {"unknown": "refused"}


def test_why_a_probe_proves_nothing_is_told() -> None:
    scene = Scene(plan()).serve()
    scene.feed(e.Answered(1.0, M, Unknown(1.0, "404"), 0.1))
    assert engine(scene)["probe"] == "404"


# -- readings

def test_what_nobody_has_seen_is_unknown_with_its_reason() -> None:
    document = told(Scene(plan()))
    assert document["gpus"] == document["host"] == {"unknown": "not sampled yet"}
    assert document["kernel_log"] == "read"


def test_a_card_and_a_host_are_told_whole() -> None:
    scene = Scene(plan(gpus=(0,), share=0.8, thresholds=Thresholds(vram_warn=((0, 0.5),))))
    scene.gpus(1.0, gpu(60, (7, "python", None, 20), (9, "core", M, None)))
    scene.feed(e.HostSampled(2.0, host()))
    scene.feed(e.KernelRead(2.0, Unknown(2.0, "permission denied")))
    document = told(scene)
    assert document["gpus"] == [{
        "index": 0, "uuid": "GPU-0", "name": "card", "used_bytes": 60 * GIB, "total_bytes": 100 * GIB, "utilization": 1,
        "temperature_c": 40, "ecc_uncorrected": 0, "vram_warn": 0.5, "vram_degrade": None, "processes": [
            {"pid": 7, "name": "python", "used_bytes": 20 * GIB, "engine": None},
            {"pid": 9, "name": "core", "used_bytes": None, "engine": "primary#1"}]}]
    assert document["host"] == {"memory_total": 64 * GIB, "memory_available": 32 * GIB, "disk_total": 100 * GIB,
                                "disk_free": 50 * GIB, "load": 0.5, "cgroup_total": None,
                                "cgroup_available": None}
    assert document["kernel_log"] == {"unknown": "permission denied"}
    assert document["symptoms"] == [{"class": "vram_high", "subject": "gpu0", "value": 0.6}]


def test_a_symptom_that_is_not_raised_is_not_told() -> None:
    scene = Scene(plan(gpus=(0,), share=0.8, thresholds=Thresholds(vram_warn=((0, 0.5),))))
    scene.gpus(1.0, gpu(1))
    assert told(scene)["symptoms"] == []


def test_restarts_of_the_last_day_are_counted() -> None:
    world = replace(Scene(plan()).world, at=DAY_S + 10.0, restarts=(5.0, 10.0, 11.0, DAY_S))
    assert report(world)["restarts_24h"] == 2


def test_instants_are_epoch_seconds_and_never_is_nothing() -> None:
    scene = Scene(plan(), at=7.25)
    assert told(scene)["at"] == WALL + 7.25
    assert scene.engine().ready_at == inf and engine(scene)["ready"] is None


# -- the headline

def test_the_headline_says_who_serves_and_how_it_is() -> None:
    scene = Scene(plan(gpus=(0,), share=0.6))
    scene.gpus(0.1, gpu(0.0))
    scene.serve()
    scene.gpus(1.0, gpu(71.4), gpu(99.0, index=1))
    assert headline(scene.world) == "primary serving, gen 1, VRAM 71 %", "a card of nobody's is nobody's news"
    scene.crash("primary", 2.0)
    scene.gpus(2.1, gpu(0.0))
    scene.ask("pause")
    assert headline(scene.world) == "primary starting, gen 2, VRAM 0 %, 1 restart today, automatic actions are paused"


def test_the_headline_of_a_stop_names_what_still_runs() -> None:
    scene = Scene(plan()).serve()
    scene.feed(e.StopAsked(5.0, "SIGTERM"))
    assert headline(scene.world) == "primary stopping, gen 1"
    scene.crash()
    assert headline(scene.world) == "nothing runs"


def test_the_headline_counts_restarts_of_a_day() -> None:
    scene = Scene(plan())
    world = replace(scene.world, restarts=(-DAY_S - 1, -5, 0.0))
    assert headline(world) == "primary starting, gen 1, 2 restarts today"
