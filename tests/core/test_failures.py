from __future__ import annotations

from dataclasses import replace

from vllm_watchdog.core.failures import FAILURES_KEPT, Ended, Failure, added, filed

ONE = Failure(5.0, "primary#1", "engine_dead_v1", "EngineDeadError")


def many(*classes: str) -> tuple[Failure, ...]:
    failures: tuple[Failure, ...] = ()
    for number, class_ in enumerate(classes, 1):
        failures = added(failures, Failure(float(number), f"primary#{number}", class_, "x"))
    return failures


def test_each_generation_has_a_failure_of_its_own_with_its_own_end() -> None:
    first = added((), replace(ONE, ended=Ended("primary#1", -9, False)))
    both = added(first, Failure(20.0, "primary#2", "engine_hang", "no token", Ended("primary#2", 0, True)))
    assert [(each.number, each.mark, each.ended.code) for each in both] == [(1, "primary#1", -9), (2, "primary#2", 0)]


def test_what_is_known_better_keeps_when_it_failed_and_where_its_evidence_is() -> None:
    failures = filed(added((), ONE), "primary#1", "logs/x")
    end = Ended("primary#1", 0, False)
    failures = added(failures, Failure(9.0, "primary#1", "oom_runtime", "CUDA out of memory", end))
    assert failures == (Failure(5.0, "primary#1", "oom_runtime", "CUDA out of memory", end, "logs/x"),)
    assert added(failures, ONE)[0].ended == end, "an end that is known stays known"


def test_the_first_bundle_of_a_generation_is_its_failures() -> None:
    failures = filed(filed(many("a", "b"), "primary#2", "logs/x/dump-2"), "primary#2", "logs/x/dump-3")
    assert [each.folder for each in failures] == ["", "logs/x/dump-2"]


def test_of_many_the_first_the_newest_and_one_of_each_class_stay() -> None:
    failures = many("a", "b", *["c"] * 30, "a")
    assert len(failures) == FAILURES_KEPT
    assert [failures[0].number, failures[1].number, failures[-1].number] == [1, 2, 33]
    assert {each.class_ for each in failures} == {"a", "b", "c"}


def test_of_more_classes_than_are_kept_the_oldest_but_the_first_goes() -> None:
    failures = many(*(f"class-{number}" for number in range(1, FAILURES_KEPT + 2)))
    assert [each.number for each in failures] == [1, *range(3, FAILURES_KEPT + 2)]
