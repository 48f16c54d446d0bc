from __future__ import annotations

import pytest

from vllm_watchdog.core.places import Place, row
from vllm_watchdog.core.records import Kind, Record

ENGINE = Record(Kind.RECORD, "RuntimeError: it broke at 7 now", level="ERROR", file="core.py", lineno=1)
RAW = Record(Kind.RAW, "RuntimeError: it broke at 7 now")


@pytest.mark.parametrize(
    ("place", "record", "holds"),
    [
        (Place.ENGINE, ENGINE, True),
        (Place.ENGINE, RAW, False),
        (Place.RAISED, RAW, True),
        (Place.RAISED, Record(Kind.RAW, "it broke at 7 now"), False),
        (Place.RAISED, Record(Kind.RAW, "a word: it broke at 7 now"), False),
        (Place.RAISED, Record(Kind.RAW, "[rank0]: a.b.InductorError: RuntimeError: it broke at 7 now"), True),
        (Place.RAISED, Record(Kind.RAW, "RuntimeError: Worker failed with error 'it broke at 7 now"), True),
        (Place.NATIVE, Record(Kind.RAW, "[rank0]:[E626 x.cpp:1] [PG 2] it broke at 7 now"), True),
        (Place.NATIVE, Record(Kind.RAW, "  what():  it broke at 7 now"), True),
        (Place.NATIVE, Record(Kind.RAW, "[W626 x.cpp:1] it broke at 7 now"), False),
        (Place.LINE, Record(Kind.RAW, "it broke at 7 now"), True),
        (Place.LINE, ENGINE, False),
        (Place.SERVER, Record(Kind.SERVER, "it broke at 7 now"), True),
        (Place.SERVER, ENGINE, False),
        (Place.SERVER, RAW, False),
        (Place.ENGINE, Record(Kind.RECORD, "it broke at 7 now", level="INFO", file="core.py"), False),
        (Place.ENGINE, Record(Kind.RECORD, "it broke at 7 now", level="ERROR", file="serving.py"), False),
        (Place.ENGINE, Record(Kind.RECORD, "'it broke at 7 now'", level="ERROR", file="core.py"), False),
        (Place.RAISED, Record(Kind.ACCESS, "RuntimeError: it broke at 7 now"), False),
    ],
)
def test_a_fragment_counts_only_in_its_place(place: Place, record: Record, holds: bool) -> None:
    assert row("x", 1, place, "it broke at *now").matches(record) is holds


def test_a_note_counts_at_any_level_of_its_files() -> None:
    noted = row("x", 1, Place.NOTE, "blocked", files=frozenset({"shm.py"}))
    assert noted.matches(Record(Kind.RECORD, "blocked for 60 s", level="INFO", file="shm.py"))
    assert not noted.matches(Record(Kind.RECORD, "blocked for 60 s", level="ERROR", file="core.py"))


def test_a_fragment_that_names_its_class_needs_no_other() -> None:
    raised = row("x", 1, Place.NATIVE, "BadError: why")
    assert raised.matches(Record(Kind.RAW, "pkg.errors.BadError: why not"))
    assert raised.matches(Record(Kind.RECORD, "pkg.errors.BadError: why", level="CRITICAL", file="engine.py"))


def test_the_needle_is_the_longest_literal() -> None:
    assert row("x", 1, Place.ENGINE, "ab*longer*c").needles == ("longer",)
