from __future__ import annotations

from dataclasses import replace
from math import sin

import pytest
from tests.core.scenes import GIB, Scene, finding, gpu, host, mark, metrics, plan, tree

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.plan import Limits, Thresholds
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import Metrics, Unknown
from vllm_watchdog.core.sampled import hold, watches_of
from vllm_watchdog.core.symptoms import Sighting
from vllm_watchdog.core.turn import Turn

LEVELS = Thresholds(vram_warn=((0, 0.85),), vram_degrade=((0, 0.95),), rss_bytes=8 * GIB, rss_slope_mib_per_min=5.0)
PLAN = plan(gpus=(0,), share=0.8, thresholds=LEVELS)
M = mark("primary#1")


def serving(the_plan: object = PLAN) -> Scene:
    scene = Scene(the_plan)
    scene.gpus(0.0, gpu(1))
    return scene.serve()


def bundles(scene: Scene) -> list[tuple[object, str]]:
    return [(dump.mark, dump.reason) for dump in scene.all(c.Dump)]


# -- a value that hovers at its threshold

def test_a_value_that_oscillates_around_its_threshold_for_ten_minutes_is_one_bundle_one_alert_one_resolved() -> None:
    """A second apart, now over, now under: alarms by the hundred were the scar."""
    scene = serving()
    for second in range(600):
        scene.gpus(10.0 + second, gpu(85 + 1.5 * sin(second)))
    assert bundles(scene) == [(M, "vram_high")]
    assert scene.alerts() == [("opened", "vram_high")]
    for second in range(200):
        scene.gpus(610.0 + second, gpu(70))
    assert bundles(scene) == [(M, "vram_high")]
    assert scene.alerts() == [("opened", "vram_high"), ("resolved", "vram_high")]
    assert scene.world.incidents == ()


def test_a_value_that_swings_far_for_hours_makes_a_bundle_in_ten_minutes_at_most() -> None:
    """Each swing clears and raises again; the incident stays the same, and the evidence is bounded."""
    scene = serving()
    for second in range(0, 7200, 2):
        scene.gpus(10.0 + second, gpu(90 if second % 260 < 10 else 50))
    told = [(alert.incident.id, alert.kind) for alert in scene.all(c.Alert)]
    assert len(told) == len(set(told))
    assert 2 <= len(bundles(scene)) <= 12


def test_a_symptom_that_is_raised_again_within_the_interval_joins_without_another_bundle() -> None:
    scene = serving()
    scene.gpus(10.0, gpu(90))
    scene.gpus(11.0, gpu(50))
    scene.gpus(131.0, gpu(50))
    assert scene.said("symptom.cleared") == [{"symptom": "vram_high", "subject": "gpu0"}]
    scene.gpus(140.0, gpu(90))
    assert len(scene.said("symptom.raised")) == 2 and len(bundles(scene)) == 1
    scene.gpus(141.0, gpu(50))
    scene.gpus(261.0, gpu(50))
    scene.gpus(610.0, gpu(90))
    assert len(bundles(scene)) == 2, "the first one was 600 s ago"


def test_a_symptom_that_cleared_is_calm_from_then_on() -> None:
    scene = serving()
    scene.gpus(10.0, gpu(90))
    scene.gpus(2000.0, gpu(50))
    scene.gpus(2120.0, gpu(50))
    assert [entry.what for entry in scene.world.incidents[0].timeline][-1] == "cleared"
    scene.at(2149.9)
    assert scene.world.incidents
    scene.at(2150.0)
    assert not scene.world.incidents
    assert scene.all(c.Record)[-1].incident.timeline[-1].text == "calm for 30 s"


# -- GPUs

def test_every_configured_card_is_watched_and_no_other() -> None:
    levels = replace(LEVELS, vram_warn=((0, 0.85), (1, 0.85)))
    scene = serving(plan(gpus=(0,), share=0.8, thresholds=levels))
    scene.gpus(10.0, gpu(99, index=1), gpu(90))
    assert [watch.subject for watch in scene.world.watches if watch.raised] == ["gpu0"]


def test_a_cards_symptom_names_the_engine_that_is_meant_to_serve_there() -> None:
    scene = serving()
    scene.gpus(10.0, gpu(90))
    incident = scene.world.incidents[0]
    assert (incident.service, incident.engine, incident.urgency) == ("primary", "primary", Urgency.WARNING)
    assert incident.text == "GPU 0: 90.0% of 100.0 GiB in use, threshold 85.0%"


def test_a_card_that_fills_before_anything_was_started_has_no_generation_to_name() -> None:
    scene = Scene(PLAN)
    scene.gpus(0.0, gpu(99))
    assert scene.phase() is Phase.RELEASING
    assert bundles(scene) == [(None, "vram_high")]


def test_growth_is_measured_from_the_level_some_minutes_after_ready() -> None:
    scene = serving(plan(gpus=(0,), share=0.8))
    scene.gpus(299.0, gpu(20))
    assert scene.engine().warm == ()
    scene.gpus(300.0, gpu(70))
    assert scene.engine().warm == ((0, 70 * GIB),)
    scene.gpus(301.0, gpu(74))
    scene.gpus(400.0, gpu(74))
    assert not scene.world.incidents, "4 % is no growth yet"
    scene.gpus(401.0, gpu(75))
    scene.gpus(460.0, gpu(75))
    assert not scene.world.incidents
    scene.gpus(461.0, gpu(75))
    assert scene.world.incidents[0].class_ == "vram_growth"
    assert scene.engine().warm == ((0, 70 * GIB),)


def test_each_card_of_an_engine_has_its_own_level() -> None:
    scene = Scene(plan(gpus=(0, 1), share=0.8))
    scene.gpus(0.0, gpu(1), gpu(1, index=1))
    scene.serve()
    scene.gpus(300.0, gpu(70), gpu(60, index=1))
    assert scene.engine().warm == ((0, 70 * GIB), (1, 60 * GIB))


def test_growth_is_forgotten_with_the_generation_that_grew() -> None:
    scene = serving(plan(gpus=(0,), share=0.8))
    for at, used in ((300.0, 70), (301.0, 80), (362.0, 80)):
        scene.gpus(at, gpu(used))
    assert [watch.class_ for watch in scene.world.watches if watch.raised] == ["vram_growth"]
    scene.crash("primary", 400.0)
    assert [watch for watch in scene.world.watches if watch.raised] == []


def test_a_card_is_not_compared_while_its_engine_does_not_serve() -> None:
    scene = serving(plan(gpus=(0,), share=0.8))
    scene.feed(e.Exited(310.0, M, 1))
    scene.gpus(320.0, gpu(70))
    assert scene.engine().warm == ()


def test_gpus_that_fall_silent_are_an_incident_of_the_host_until_they_answer() -> None:
    scene = serving()
    scene.blind(50.0)
    assert scene.alerts() == [("opened", "gpu_driver_unresponsive")]
    incident = scene.world.incidents[0]
    assert (incident.service, incident.engine, incident.generation) == ("host", "host", 0)
    assert incident.urgency is Urgency.CRITICAL
    scene.blind(51.0)
    scene.at(5000.0)
    assert len(scene.said("gpus.unknown")) == 1 and scene.alerts() == [("opened", "gpu_driver_unresponsive")]
    scene.gpus(6000.0, gpu(1))
    assert scene.world.incidents, "the driver must answer for a while"
    scene.at(6030.0)
    assert scene.alerts()[-1] == ("resolved", "gpu_driver_unresponsive")


def test_lost_gpus_are_not_found_because_the_kernel_named_a_better_reason() -> None:
    scene = serving()
    scene.blind(50.0)
    scene.feed(e.KernelRead(50.1, (finding("xid_other"),)))
    scene.feed(e.KernelRead(50.2, (finding("xid_node", pci="0000:99:00"),)))
    assert scene.world.incidents[0].class_ == "xid_node"
    scene.at(500.0)
    assert scene.world.incidents


def test_a_host_without_a_gpu_is_no_incident() -> None:
    scene = Scene(plan()).serve()
    scene.blind(1.0, "no NVIDIA driver")
    scene.blind(99.0, "no NVIDIA driver")
    assert scene.alerts() == [] and scene.said("gpus.unknown") == []


def test_the_first_sample_ends_no_symptom() -> None:
    scene = Scene(plan(gpus=(0,), share=0.8))
    scene.feed(e.HostSampled(0.1, host(1)))
    before = scene.world.incidents
    scene.gpus(0.2, gpu(1))
    assert scene.world.incidents == before


# -- host and trees

def test_a_full_disk_is_an_incident_of_the_host() -> None:
    scene = Scene(plan()).serve()
    scene.feed(e.HostSampled(10.0, host(1)))
    assert scene.alerts() == [("opened", "disk_low")]
    assert bundles(scene) == [(None, "disk_low")]
    scene.feed(e.HostSampled(20.0, host(9)))
    scene.feed(e.HostSampled(140.0, host(9)))
    scene.at(170.0)
    assert scene.alerts()[-1] == ("resolved", "disk_low")


def test_a_host_that_could_not_be_read_changes_no_symptom() -> None:
    scene = Scene(plan()).serve()
    scene.feed(e.HostSampled(10.0, Unknown(10.0, "no /proc")))
    assert isinstance(scene.world.host, Unknown) and scene.world.watches == ()


def test_a_tree_is_kept_for_its_own_generation() -> None:
    scene = serving()
    scene.feed(e.HostSampled(10.0, host(), (tree(M, 3), tree(mark("backup#7")), tree(mark("ghost#1")))))
    assert scene.engine().tree == tree(M, 3)
    assert scene.engine("backup").tree is None


def test_resident_memory_over_its_level_is_an_incident() -> None:
    scene = serving()
    scene.feed(e.HostSampled(10.0, host(), (tree(M, 9),)))
    assert scene.alerts() == [("opened", "rss_high")] and bundles(scene) == [(M, "rss_high")]


def test_a_leak_is_followed_after_warm_up_and_told_when_judgements_have_agreed() -> None:
    """0.4 GiB a minute, 32 GiB to go: enough after 20 minutes, agreed upon for 5 more."""
    scene = serving(plan(gpus=(0,), share=0.8))
    told = []
    for second in range(0, 3000, 10):
        scene.feed(e.HostSampled(float(second), host(), (tree(M, 1 + second * 0.4 / 60),)))
        assert bool(scene.engine().trends) == (second >= 300)
        told += [second] if scene.alerts() and not told else []
    assert 300 + 1200 + 300 <= told[0] <= 300 + 1260 + 300
    assert scene.alerts() == [("opened", "rss_leak")] and bundles(scene) == [(M, "rss_leak")]
    text = scene.world.incidents[0].text
    assert text.startswith("resident memory grows by 410 MiB a minute: the host's 64.0 GiB are reached in about 80 min")
    assert text.endswith("most of it API server (PID 100)")
    (growth,) = scene.engine().growths
    assert growth.what == "rss" and growth.leaks
    scene.crash("primary", 3000.0)
    scene.gpus(3000.1, gpu(1))
    assert scene.engine().growths == () == scene.engine().trends


def test_a_card_that_grows_is_told_with_its_rate() -> None:
    scene = serving(plan(gpus=(0,), share=0.8))
    grown = []
    for second in range(300, 5000, 10):
        scene.gpus(float(second), gpu(60 + second / 500))
        scene.feed(e.HostSampled(second + 1.0, host(), (tree(M, 1),)))
        grown.append(tuple(growth.what for growth in scene.engine().growths))
    assert scene.world.incidents[0].class_ == "vram_growth"
    assert "; it grows by 123 MiB a minute: the card's 100.0 GiB are reached in about" in scene.world.incidents[0].text
    assert set(grown[-1]) == {"vram/0", "rss"}, "neither judgement forgets the other"


def test_symptoms_of_an_engine_end_with_its_processes() -> None:
    """Nothing samples a dead engine any more, so nothing would ever say that they cleared."""
    scene = serving()
    scene.feed(e.HostSampled(10.0, host(1), (tree(M, 9),)))
    scene.crash("primary", 20.0)
    assert [watch.class_ for watch in scene.world.watches if watch.raised] == ["disk_low"]


@pytest.mark.parametrize(("cpu", "io", "active"), [
    (0.05, 0, True), (0.049, 0, False), (0.0, (1 << 20) + 5, True), (0.0, (1 << 20) + 4, False), (None, None, False)])
def test_loading_is_activity_of_cpu_or_disk(cpu: float | None, io: int | None, active: bool) -> None:
    scene = Scene(plan())
    scene.feed(e.Spawned(0.1, M, 100))
    scene.feed(e.HostSampled(1.0, host(), (tree(M, cpu=0.0, io=5),)))
    assert scene.engine().active_at == 0.1
    scene.feed(e.HostSampled(2.0, host(), (tree(M, cpu=cpu, io=io),)))
    assert (scene.engine().active_at == 2.0) is active


def test_the_first_tree_counts_its_reads_from_nothing() -> None:
    scene = Scene(plan())
    scene.feed(e.Spawned(0.1, M, 100))
    scene.feed(e.HostSampled(1.0, host(), (tree(M, cpu=0.0, io=1 << 20),)))
    assert scene.engine().active_at == 1.0


def test_a_load_without_any_activity_is_given_up() -> None:
    scene = Scene(plan(limits=Limits(load_idle_s=60)))
    scene.feed(e.Spawned(0.0, M, 100))
    scene.feed(e.HostSampled(59.9, host(), (tree(M, cpu=0.0),)))
    assert scene.phase() is Phase.LOADING
    scene.feed(e.HostSampled(60.0, host(), (tree(M, cpu=0.0),)))
    assert scene.phase() is Phase.DUMPING
    assert (scene.engine().cause, scene.engine().why) == (
        "load_timeout", "not ready, and no CPU or disk activity for 60 s")


def test_an_idle_engine_that_serves_is_not_stuck() -> None:
    scene = Scene(plan(limits=Limits(load_idle_s=60))).serve()
    scene.feed(e.HostSampled(600.0, host(), (tree(M, cpu=0.0),)))
    assert scene.phase() is Phase.SERVING


# -- metrics

def test_kv_pressure_is_raised_after_two_minutes() -> None:
    scene = serving()
    scene.feed(e.Scraped(10.0, M, metrics(1, kv=0.99, waiting=5.0)))
    scene.feed(e.Scraped(129.0, M, metrics(2, kv=0.99, waiting=5.0)))
    assert scene.alerts() == []
    scene.feed(e.Scraped(130.0, M, metrics(3, kv=0.99, waiting=5.0)))
    assert scene.alerts() == [("opened", "kv_pressure")]


def test_preemptions_that_go_on_are_a_symptom() -> None:
    scene = serving()
    for at in range(10, 400, 10):
        scene.feed(e.Scraped(float(at), M, replace(metrics(at), preemptions=float(at))))
        assert bool(scene.alerts()) == (at >= 40 + 300)
    assert scene.alerts() == [("opened", "preemptions")]


def test_a_scrape_that_failed_neither_raises_nor_clears() -> None:
    scene = serving()
    for at in (10.0, 130.0):
        scene.feed(e.Scraped(at, M, metrics(at, kv=0.99, waiting=5.0)))
    scene.feed(e.Scraped(500.0, M, Unknown(500.0, "refused")))
    assert [watch.raised for watch in scene.world.watches if watch.class_ == "kv_pressure"] == [True]
    assert not isinstance(scene.engine().metrics, Metrics)


def test_watches_belong_to_the_service_of_their_engine_or_card() -> None:
    scene = serving(plan(gpus=(0,), backup_gpus=(1,), share=0.8, thresholds=replace(LEVELS, vram_warn=((0, 0.8), (1, 0.8)))))
    scene.feed(e.HostSampled(10.0, host(1), (tree(M, 9),)))
    scene.gpus(11.0, gpu(81), gpu(81, index=1))
    assert {watch.subject for watch in watches_of(scene.world, "primary")} == {"primary", "gpu0", "gpu1"}
    assert {watch.subject for watch in watches_of(scene.world, "host")} == {"host"}


def test_what_is_at_ease_is_not_watched_on() -> None:
    scene = serving()
    scene.feed(e.HostSampled(10.0, host(), (tree(M),)))
    scene.gpus(11.0, gpu(1))
    assert scene.world.watches == ()
    scene.gpus(12.0, gpu(86))
    assert [watch.class_ for watch in scene.world.watches] == ["vram_high"]


def test_a_watch_of_a_card_without_an_engine_is_the_hosts() -> None:
    """The engine of a card may be configured away while its symptom is raised."""
    from vllm_watchdog.core.sampled import _whose
    from vllm_watchdog.core.turn import Turn

    turn = Turn(serving().world, 5.0)
    assert [_whose(turn, subject) for subject in ("gpu0", "gpu7", "gpux", "primary", "host")] == [
        "primary", "host", "gpux", "primary", "host"]


def test_a_symptom_may_be_critical_clear_at_once_and_need_no_evidence() -> None:
    turn = Turn(serving().world, 5.0)
    text = Text("nobody serves", "无人服务")
    down = Sighting("engine_down", "primary", 1.0, 1.0, 0, 0.5, lambda: text, 0.0, Urgency.CRITICAL, evidence=False)
    hold(turn, [down])
    assert turn.world.incidents[0].urgency is Urgency.CRITICAL
    assert not [command for command in turn.commands if isinstance(command, c.Dump)]
    hold(turn, [replace(down, value=0.0)])
    assert not any(watch.raised for watch in turn.world.watches)
