from __future__ import annotations

from dataclasses import dataclass

import pytest

from vllm_watchdog.core.changed import changed


@dataclass(frozen=True, slots=True)
class Pair:
    one: int = 1
    two: tuple[int, ...] = ()


@pytest.mark.parametrize("facts", [{}, {"one": 1}, {"two": ()}, {"one": 1, "two": ()}])
def test_a_value_that_nothing_changes_stays_the_same_object(facts: dict[str, object]) -> None:
    value = Pair()
    assert changed(value, **facts) is value


@pytest.mark.parametrize("facts", [{"one": 2}, {"two": (1,)}, {"one": 1, "two": (1,)}, {"one": 2, "two": ()}])
def test_what_differs_makes_a_new_one(facts: dict[str, object]) -> None:
    value = Pair()
    assert changed(value, **facts) == Pair(**facts) != value == Pair()


def test_a_field_that_it_has_not_is_an_error() -> None:
    with pytest.raises(AttributeError):
        changed(Pair(), three=3)
