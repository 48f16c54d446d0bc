from __future__ import annotations

import sys

from vllm_watchdog.tell.track import Track


def rows(track, above=-1.0):
    return list(track.rows("t", above))


def test_the_newest_row_replaces_the_oldest():
    track = Track(3)
    for second in range(5):
        track.append({"t": second, "used": second * 10})
    assert len(track) == 3
    assert rows(track) == [{"t": 2, "used": 20}, {"t": 3, "used": 30}, {"t": 4, "used": 40}]
    assert rows(track, 3) == [{"t": 4, "used": 40}]


def test_what_is_not_known_is_left_out():
    track = Track(4)
    track.append({"t": 1, "a": 1})
    track.append({"t": 2, "b": 2.5})
    track.append({"t": 3, "a": 0})
    assert rows(track) == [{"t": 1, "a": 1}, {"t": 2, "b": 2.5}, {"t": 3, "a": 0}]


def test_whole_numbers_come_back_whole():
    track = Track(2)
    track.append({"t": 1, "bytes": 150_754_820_096, "share": 0.25})
    (row,) = rows(track)
    assert {name: type(value) for name, value in row.items()} == {"t": int, "bytes": int, "share": float}


def test_a_figure_that_comes_no_more_costs_nothing_in_the_end():
    track = Track(3)
    for second in range(9):
        track.append({"t": second, f"held:{min(second, 4)}": 1})
    assert set(track._columns) == {"t", "held:4"}


def test_a_copy_stands_still():
    track = Track(3)
    track.append({"t": 1})
    copy = track.copy()
    for second in range(2, 9):
        track.append({"t": second})
    assert rows(copy) == [{"t": 1}]


def test_ten_minutes_of_ten_figures_take_a_tenth_of_a_megabyte():
    track = Track(1_200)
    for second in range(600):
        track.append({"t": second} | {f"figure {number}": second / 7 for number in range(9)})
    assert sum(map(sys.getsizeof, track._columns.values())) < 100_000


def test_of_a_figure_that_nobody_told_there_are_no_rows():
    track = Track(2)
    track.append({"a": 1})
    assert rows(track) == []
