"""The last rows of figures of one subject, in columns of doubles.

Eight bytes a figure, all of them there from the start, where objects would take eighty; and objects that live for minutes
among those of a moment keep the allocator from ever giving a page back.  A ring: the newest row replaces the oldest.  One
thread appends; whoever reads takes a `copy` first, between two rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from math import isnan, nan

MOST_WHOLE = 1 << 53    # beyond it a double has no place for the last digit


class Track:
    def __init__(self, rows: int) -> None:
        self._size, self._taken = rows, 0       # rows that fit, and rows ever appended
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return min(self._taken, self._size)

    def append(self, figures: Mapping[str, float]) -> None:
        """A figure that is left out is not known in this row."""
        for name in figures.keys() - self._columns.keys():
            self._columns[name] = self._unknown()
        place = self._taken % self._size
        for name, column in self._columns.items():
            column[place] = figures.get(name, nan)
        self._taken += 1
        if place == self._size - 1:
            self._columns = {name: column for name, column in self._columns.items() if not all(map(isnan, column))}

    def _unknown(self) -> array[float]:
        return array("d", (nan,)) * self._size

    def copy(self) -> Track:
        other = Track(self._size)
        other._taken, other._columns = self._taken, {name: column[:] for name, column in self._columns.items()}
        return other

    def rows(self, name: str, above: float) -> Iterator[dict[str, float]]:
        """What is known, oldest first, where figure `name` is above `above`."""
        chosen = self._columns.get(name) or self._unknown()
        for number in range(self._taken - len(self), self._taken):
            place = number % self._size
            if chosen[place] > above:
                yield {key: _plain(value) for key, column in self._columns.items() if not isnan(value := column[place])}


def _plain(value: float) -> float:
    """A count is shown as one."""
    return int(value) if value.is_integer() and abs(value) < MOST_WHOLE else value
