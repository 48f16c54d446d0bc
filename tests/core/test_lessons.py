from __future__ import annotations

from dataclasses import replace

from tests.core.scenes import finding
from tests.core.test_story import one, request

from vllm_watchdog.core import incidents, lessons, story
from vllm_watchdog.core.failures import Ended, Failure
from vllm_watchdog.core.incidents import Flight, Incident, Need, Urgency, failed
from vllm_watchdog.core.levels import Levels


def failure(number: int, class_: str = "oom_runtime", text: str = "CUDA out of memory", ended: Ended | None = None,
            folder: str = "") -> Failure:
    return Failure(10.0 * number, f"primary#{number}", class_, text, ended, folder)


def twice() -> Incident:
    """Ended from outside, then hung: each with its end and its folder."""
    incident = replace(one("engine_proc_died"), levels=Levels(5.0))
    incident = failed(incident, failure(1, "engine_proc_died", "engine core exited", Ended("primary#1", -9, False),
                                        f"logs/{incident.id}"))
    return failed(incident, failure(2, "engine_hang", "no token for 12 s", Ended("primary#2", 0, True),
                                    f"logs/{incident.id}/dump-2"))


# -- its failures

def test_of_one_failure_the_page_tells_and_no_list() -> None:
    once = failed(one(), failure(1))
    assert lessons.failures(once) == () == lessons.failures(one())
    assert lessons.counted(once) is None is lessons.counted(one())


def test_each_failure_is_told_with_its_proof_its_end_and_its_evidence() -> None:
    first, second = (text.en for text in lessons.failures(twice()))
    assert first == (
        "11:06:50Z primary#1: The engine process was ended from outside (engine_proc_died); proof: engine core exited; "
        "how it ended: ended by signal 9, which the watchdog did not send; see kernel.txt; evidence: this folder")
    assert second == (
        "11:07:00Z primary#2: The engine hangs: no token comes, and its counters stand still (engine_hang); "
        "proof: no token for 12 s; "
        "how it ended: the watchdog stopped what was left of it, after the failure; evidence: dump-2/")
    assert "依据：no token for 12 s" in lessons.failures(twice())[1].zh
    bare = lessons.failures(failed(twice(), failure(3, text="x")))[2].en
    assert bare == "11:07:10Z primary#3: GPU out of memory while serving (oom_runtime); proof: x"


def test_in_one_line_all_are_counted_or_the_newest_is_told() -> None:
    assert lessons.counted(twice()).en == (
        "2 failures: 1. 11:06:50Z primary#1: The engine process was ended from outside (engine_proc_died); "
        "2. 11:07:00Z primary#2: The engine hangs: no token comes, and its counters stand still (engine_hang)")
    newest = lessons.counted(twice(), newest=True)
    assert newest.en.startswith("2 failures: 2. 11:07:00Z primary#2: The engine hangs") and "no token for 12 s" in newest.en
    assert newest.zh.startswith("共 2 次故障：2. ")


def test_every_class_has_its_own_advice_the_cause_first_and_says_where_its_files_are() -> None:
    told = lessons.lessons(twice())
    assert [lesson.head.en for lesson in told] == [
        "The engine process was ended from outside (engine_proc_died)",
        "The engine hangs: no token comes, and its counters stand still (engine_hang; the files named here lie in dump-2/)"]
    assert "kernel.txt" in told[0].lines[0].en and "stacks.txt" in told[1].lines[0].en
    turned = [lesson.head.en[:16] for lesson in lessons.lessons(twice(), "engine_hang")]
    assert turned == ["The engine hangs", "The engine proce"]
    assert lessons.advice(twice()) == told[0].lines + told[1].lines


def test_what_two_classes_advise_alike_is_told_once() -> None:
    incident = failed(failed(one("api_unreachable"), failure(1, "api_unreachable")), failure(2, "engine_hang"))
    lines = lessons.advice(incident)
    assert len(lines) == len(set(lines)) > 0
    same = failed(failed(one("no_such"), failure(1, "no_such")), failure(2, "neither"))
    assert lessons.lessons(same) == ()


def test_a_class_is_judged_by_its_own_requests_end_and_memory() -> None:
    incident = twice()
    for number, tokens in ((1, 50_000), (2, 9_000)):
        incident = incidents.flown(incident, Flight(f"primary#{number}", 1, 0, (request(tokens),)))
    first, second = lessons.case_of(incident), lessons.case_of(incident, "engine_hang")
    assert (first.longest.tokens_estimated, first.exit_code, first.levels) == (50_000, -9, Levels(5.0))
    assert (second.longest.tokens_estimated, second.exit_code, second.levels) == (9_000, None, None)


def test_both_engines_that_are_held_are_named_with_the_command_for_each() -> None:
    held = one("bad_args", Urgency.PAGE)
    for name in ("primary", "backup"):
        held = incidents.needed(held, Need(name, "bad_args", f"{name} is held: {'x' * 900}", f"{name} 已停止重试"))
    assert "primary is held" in story.state(held).en and "backup is held" in story.state(held).en
    assert len(story.state(held).en) < 300
    assert "`llm-watchdog restart primary` and `llm-watchdog restart backup`" in lessons.advice(held)[-1].en
    left = incidents.relieved(held, "primary")
    assert "primary" not in story.state(left).en and "backup is held" in story.state(left).en
    assert "`llm-watchdog restart backup`" in lessons.advice(left)[-1].en
    over = incidents.resolved(held, 9.0, 9.0, "calm")
    assert story.state(over).en.startswith("The service is restored, but a human is still needed: primary is held")


# -- what to change

def test_the_cause_of_the_incident_has_the_last_word_on_facts() -> None:
    late = finding("oom_runtime", "OOM", gpu=0, requested_bytes=1)
    incident = incidents.proved(one(), (late, finding("worker_died", "died", gpu=1, exit_code=-9)))
    assert dict(lessons.case_of(incident).details) == {"gpu": 0, "requested_bytes": 1, "exit_code": -9}


def test_the_request_to_suspect_is_the_one_that_was_kept_back_else_the_longest() -> None:
    incident = incidents.flown(one(), Flight("p#1", 2, 0, (request(90_000), request(50_000, "suspect"))))
    assert lessons.case_of(incident).longest.tokens_estimated == 50_000
    assert lessons.case_of(one()).longest is None


def test_only_an_exit_that_was_not_our_doing_is_a_fact() -> None:
    assert lessons.case_of(failed(one(), failure(1, ended=Ended("p#1", -9, True)))).exit_code is None
    assert lessons.case_of(failed(one(), failure(1, ended=Ended("p#1", -9, False)))).exit_code == -9


def test_a_held_engine_is_let_go_by_a_last_step() -> None:
    held = replace(one("bad_args", Urgency.PAGE), needs=(Need("primary", "bad_args", "primary is held: " + "x" * 900, "…"),))
    assert "`llm-watchdog restart primary`" in lessons.advice(held)[-1].en
    assert "`args` of [engines.primary]" in lessons.advice(held)[-1].en
    assert "`llm-watchdog reload`, which says what needs a restart of the watchdog" in lessons.advice(held)[-1].en
    assert len(story.state(held).en) < 300
    stuck = replace(held, needs=(Need("primary", "wedged", "it survived", "…"),))
    assert all("restart primary" not in line.en for line in lessons.advice(stuck))
    assert all("restart primary" not in line.en for line in lessons.advice(one("bad_args")))


def test_proof_is_each_line_once() -> None:
    found = finding("oom_runtime", "CUDA  out of\nmemory"), finding("engine_dead_v1", "EngineDeadError")
    incident = incidents.proved(one(), found)
    assert lessons.proof(incident) == ("CUDA out of memory", "EngineDeadError")


def test_proof_holds_the_sentence_of_every_failure() -> None:
    assert lessons.proof(twice()) == ("CUDA out of memory", "engine core exited", "no token for 12 s")
