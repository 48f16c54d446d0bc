from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.scenes import GIB, Scene, finding, gpu, host, mark, metrics, plan, tree

from vllm_watchdog.core import events as e
from vllm_watchdog.core import incidents, lessons, story
from vllm_watchdog.core.failures import Ended, Failure
from vllm_watchdog.core.incidents import HOST, Flight, Incident, Need, Urgency, noted, opened
from vllm_watchdog.core.levels import CardLevels, Levels
from vllm_watchdog.core.readings import GpuProcess, Holder, InFlight, Wait

M = mark("primary#1")
WALL = 1_795_000_000.0      # 2026-11-18T11:06:40Z


def one(class_: str = "oom_runtime", urgency: Urgency = Urgency.CRITICAL, service: str = "primary") -> Incident:
    return opened(service, service, 3, class_, urgency, "CUDA out of memory", 0.0, WALL)


def over(incident: Incident, after_s: float = 78.0) -> Incident:
    return incidents.resolved(incident, after_s, WALL + after_s, "calm")


def request(tokens: int, verdict: str = "held", begun: bool = False) -> InFlight:
    return InFlight(1, tokens * 4, 2.5, begun, "0123456789abcdef", tokens, verdict)


# -- what happened, and how it stands

def test_the_first_sentence_says_what_to_whom_where() -> None:
    assert story.happened(one(), "gpu-07").en == (
        "It happened at 11:06:40Z to engine primary (generation 3) of service primary on host gpu-07.")
    assert story.happened(one("disk_low", service=HOST)).en == "It was seen at 11:06:40Z and concerns the whole host."
    assert story.happened(one()).zh == "11:06:40Z 发生在服务 primary 的引擎 primary（第 3 代）。"


def test_a_class_without_an_entry_is_its_own_title() -> None:
    assert story.heading(one()).en == "GPU out of memory while serving: primary"
    assert story.title(one("no_such_class")).en == "no_such_class"


def test_an_incident_says_how_it_stands_in_every_state() -> None:
    held = replace(one(urgency=Urgency.PAGE), needs=(Need("primary", "bad_args", "primary is held: no such flag.", "…"),))
    for incident, wanted in (
        (one("snapshot"), "Nothing was wrong"),
        (over(one()), "Resolved after 78.0 s"),
        (over(held), "The service is restored, but a human is still needed: primary is held: no such flag."),
        (held, "Not resolved, a human is needed: primary is held"),
        (incidents.down(one(), 5.0), "no engine serves since 11:06:45Z"),
        (one("vram_high", Urgency.WARNING), "it is watched"),
        (one(), "An engine serves"),
        (one("gpu_driver_unresponsive", service=HOST), "it is watched"),
        (noted(one(), 5.0, "left"), "the watchdog was stopped by an operator"),
        (noted(noted(one(), 5.0, "left"), 6.0, "started"), "An engine serves"),
    ):
        assert wanted in story.state(incident).en


def test_why_a_human_is_needed_is_told_in_chinese_too() -> None:
    held = replace(one(urgency=Urgency.PAGE), needs=(Need("primary", "bad_args", "primary is held", "primary 已停止重试"),))
    assert story.state(held).zh == "未恢复，需要人工处理：primary 已停止重试。"
    assert story.state(over(held)).zh == "服务已恢复，但仍需人工处理：primary 已停止重试。"


def test_what_was_done_is_told_in_order_and_nothing_else() -> None:
    incident = noted(noted(one(), 1.0, "phase", "primary: serving -> dumping"), 2.0, "evidence", "logs/x", folder="logs/x")
    incident = noted(incident, 3.0, "failover", "primary -> backup", leaving="primary", to="backup", because="oom_again")
    incident = noted(incident, 4.0, "action", "gateway lowered to 16 at a time")
    assert [(step.at, step.text.en) for step in story.actions(incident)] == [
        (2.0, "evidence saved"), (3.0, "failover from primary to backup, because it ran out of memory again"),
        (4.0, "gateway lowered to 16 at a time")]


def test_of_a_crash_loop_the_first_and_the_last_deeds_are_told() -> None:
    incident = one()
    for number in range(40):
        incident = noted(incident, float(number), "started", "", engine=f"primary#{number}")
    steps = [step.text.en for step in story.actions(incident)]
    assert len(steps) == story.STEPS_SHOWN
    assert (steps[0], steps[-1]) == ("primary#0 was started", "primary#39 was started")


# -- what clients saw

def test_the_gap_is_told_while_it_lasts_and_when_it_is_over() -> None:
    assert story.gap(one()).en == "The service was never without an engine."
    down = incidents.down(one(), 5.0)
    assert story.gap(down).en == "No engine serves since 11:06:45Z."
    assert story.gap(incidents.up(down, 53.2)).en == "No engine served for 48.2 s, until 11:07:33Z."
    stopped = noted(incidents.up(down, 53.2), 53.2, "left")
    assert story.gap(stopped).en == (
        "No engine served for 48.2 s, until the watchdog was stopped at 11:07:33Z; none serves since.")
    assert story.gap(noted(incidents.up(down, 53.2), 60.0, "left")).en.endswith("until 11:07:33Z.")
    assert story.gap(one("disk_low", service=HOST)) is None
    assert story.gap(one("snapshot")) is None


def test_what_clients_waited_is_told_or_that_nobody_knows() -> None:
    wait = Wait(42, 48.24, 47.0, failed=1, replayed=40)
    (told,) = story.clients(incidents.waited(one(), wait))
    assert told.en == ("42 requests that waited in the gateway were answered: the longest 48.2 s after it had come, half of "
                       "them within 47.0 s; 1 got no answer; 40 were sent to an engine again")
    told_one = story.wait_of(Wait(1, 33.7, 33.7))
    assert told_one.en == "one request that waited in the gateway was answered 33.7 s after it had come"
    assert "中位 47.0 s" in told.zh
    told = story.wait_of(Wait(0, 0.0, 0.0, failed=7))
    assert told.en == "no request that waited in the gateway was answered; 7 got no answer"
    back = incidents.up(incidents.down(one(), 1.0), 2.0)
    assert story.clients(one()) == ()
    assert story.clients(back)[0].en.startswith("Nobody is known to have waited")
    assert story.clients(incidents.flown(back, Flight("primary#1", 1, 0))) == ()


def test_a_flight_is_told_with_its_largest_request() -> None:
    none = story.flight_of(Flight("primary#1", 0, 0))
    assert none.en == "requests in flight on primary#1: 0, of them already answering: 0"
    told = story.flight_of(Flight("primary#1", 2, 1, (request(60_000, "suspect"),)))
    assert "about 60000 tokens" in told.en and "not begun, kept from the next engine as the suspect" in told.en
    assert "作为嫌疑请求被拦下" in told.zh
    assert "answering, odd" in story.flight_of(Flight("p#1", 1, 1, (request(1, "odd", begun=True),))).en


@pytest.mark.parametrize(("end", "wanted"), [
    (Ended("primary#1", 0, False), "primary#1: exit code 0, which means nothing"),
    (Ended("primary#1", 3, False), "primary#1: exit code 3"),
    (Ended("primary#1", -9, False), "primary#1: ended by signal 9, which the watchdog did not send; see kernel.txt"),
    (Ended("primary#1", -9, True), "primary#1: the watchdog stopped what was left of it"),
    (Ended("primary#1", None, False), "primary#1: nobody saw how"),
])
def test_an_end_is_told_in_words(end: Ended, wanted: str) -> None:
    assert story.ended(incidents.failed(one(), Failure(1.0, "primary#1", "x", "", end))).en.startswith(wanted)


def test_code_two_is_a_refused_command_line_only_where_the_log_shows_that() -> None:
    def told(class_: str) -> str:
        return story.ended(incidents.failed(one(), Failure(1.0, "primary#1", class_, "", Ended("primary#1", 2, False)))).en

    assert told("bad_args").endswith("vLLM refused its command line") and told("unexpected_exit") == "primary#1: exit code 2"


def test_without_an_end_nothing_is_told_of_it() -> None:
    assert story.ended(one()) is None


# -- memory

def test_memory_is_a_small_table_in_both_languages() -> None:
    others = (GpuProcess(Holder(4711, "python3"), 9 * GIB), GpuProcess(Holder(5, "Xorg"), None))
    card = CardLevels(0, "A10", 21 * GIB, 22 * GIB, 12 * GIB, 20 * GIB, 0.95, others)
    levels = Levels(0.0, (card,), 4 * GIB, 3 * GIB, 0.98, 4, 12, 64 * GIB, 32 * GIB)
    rows = [[cell.en for cell in row] for row in story.memory(replace(one(), levels=levels))]
    assert rows == [
        ["GPU 0 A10", "21.0 GiB / 22.0 GiB (95%)",
         "threshold 95%; the engine 12.0 GiB; 20.0 GiB after warm-up; PID 4711 (python3) 9.0 GiB; PID 5 (Xorg) ?"],
        ["host memory of the engine (RSS)", "4.0 GiB", "3.0 GiB after warm-up"],
        ["KV cache", "98%", ""],
        ["requests in the engine", "4 running, 12 waiting", ""],
        ["host memory available", "32.0 GiB", "of 64.0 GiB"],
    ]
    assert story.memory(replace(one(), levels=levels))[0][2].zh.startswith("告警阈值 95%；引擎 12.0 GiB；预热后 20.0 GiB")


def test_what_is_not_known_has_no_row() -> None:
    assert story.memory(one()) == () == story.memory(replace(one(), levels=Levels(0.0)))
    (row,) = story.memory(replace(one(), levels=Levels(0.0, (CardLevels(1, "x", 0, 0),))))
    assert [cell.en for cell in row] == ["GPU 1 x", "0 MiB / 0 MiB (0%)", ""]
    assert [row[2].en for row in story.memory(replace(one(), levels=Levels(0.0, rss=GIB)))] == [""]


# -- from the events to the story

def test_an_oom_behind_the_gateway_is_a_whole_story() -> None:
    """What the on-call engineer asks: what happened, what was done, what did clients see, what to change."""
    scene = Scene(plan(backup=False, gpus=(0,), share=0.5))
    scene.gpus(0.1, gpu(39, (4711, "python3", None, 38)))
    scene.serve()
    scene.gpus(4.0, gpu(99, (100, "VLLM::EngineCor", M, 60), (4711, "python3", None, 38)))
    scene.feed(e.HostSampled(4.0, host(), (tree(M),)))
    scene.feed(e.Scraped(4.5, M, metrics(1.0, running=3, waiting=0, kv=0.7)))
    scene.feed(e.LogRead(5.0, M, (finding("oom_runtime", "CUDA out of memory", requested_bytes=2 * GIB, free_bytes=GIB),)))
    incident = scene.world.incidents[0]
    scene.feed(e.Casualties(5.1, M, 3, (request(60_000, "suspect"),)))
    scene.feed(e.Dumped(5.5, M, incident.id, "logs/x"))
    scene.feed(e.Exited(6.0, M, 0))
    scene.feed(e.Emptied(6.1, M, (Holder(101, "VLLM::EngineCor", M),)))
    scene.feed(e.LogRead(6.2, M, (), drained=True))
    scene.gpus(6.3, gpu(39, (4711, "python3", None, 38)))
    scene.feed(e.Spawned(6.4, mark("primary#2"), 200))
    scene.ok("primary", 53.2)
    scene.feed(e.Waited(54.0, "primary", Wait(2, 48.2, 47.0, 1, 2)))
    told = scene.world.incidents[0]
    steps = [step.text.en for step in story.actions(told)]
    assert steps == ["evidence saved", "primary#1 was told to stop",
                     "what it left behind was killed: PID 101 (VLLM::EngineCor), ours: primary#1", "primary#2 was started",
                     "primary#2 serves"]
    assert story.gap(told).en == "No engine served for 48.2 s, until 11:07:33Z."
    assert story.clients(told)[0].en.startswith("2 requests that waited")
    advice = [line.en for line in lessons.advice(told)]
    assert any("about 60000 tokens" in line for line in advice)
    assert any("PID 4711 (python3)" in line for line in advice)
    assert told.levels.kv_usage == 0.7 and told.levels.cards[0].used == 99 * GIB


def test_a_hang_counts_as_down_from_its_last_sign_of_life() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.scrape(1.0, at=1.0)
    scene.scrape(2.0, at=100.0)
    for second in range(101, 260):
        scene.scrape(2.0, at=float(second))
        if scene.engine().pulse.asked_at is not None:
            scene.feed(e.Answered(float(second), M, False, 10.0))
        if scene.world.incidents:
            break
    assert scene.world.incidents[0].class_ == "engine_hang"
    assert scene.world.incidents[0].down_at == 100.0


def test_the_page_is_taken_back_when_a_human_has_acted() -> None:
    scene = Scene(plan(backup=False))
    scene.crash("primary", 1.0, finding("bad_args", "no such flag"))
    assert [need.engine for need in scene.world.incidents[0].needs] == ["primary"]
    scene.ask("restart", "primary")
    assert not scene.world.incidents[0].page
    assert "an operator asked for restart of primary" in [step.text.en for step in story.actions(scene.world.incidents[0])]


def test_the_gauges_are_left_out_where_the_gateway_knew_of_more_requests() -> None:
    incident = replace(one(), levels=Levels(0.0, running=1, waiting=0))
    (row,) = story.memory(incidents.flown(incident, Flight("primary#1", 1, 0)))
    assert row[1].en == "1 running, 0 waiting"
    assert story.memory(incidents.flown(incident, Flight("primary#1", 2, 0))) == ()


def test_a_first_start_that_never_served_says_so() -> None:
    scene = Scene(plan(backup=False))
    scene.crash("primary", 1.0)
    told = scene.world.incidents[0]
    assert story.gap(told).en == "No engine has served yet: it was the first start, at 11:06:41Z."
    assert "no engine has served yet" in story.state(told).en
    scene.serve()
    scene.crash("primary", 9.0)
    assert story.gap(scene.world.incidents[0]).en.startswith("No engine serves since ")


def test_one_that_was_sent_again_is_told_as_one() -> None:
    assert story.wait_of(Wait(1, 16.4, 16.4, replayed=1)).en.endswith(" after it had come; one was sent to an engine again")


def test_failures_that_were_too_many_name_the_time_before() -> None:
    often = {"because": "failures", "times": "2", "window": "60 min"}
    incident = noted(one(), 3.0, "failover", **often, before="oom_runtime", before_at="01:21:04Z")
    incident = noted(noted(incident, 4.0, "failover", **often), 5.0, "failover", because="odd")
    assert [step.text.en.partition("because ")[2] for step in story.actions(incident)] == [
        "it failed 2 times within 60 min (the time before: oom_runtime at 01:21:04Z)",
        "it failed 2 times within 60 min", "odd"]
