from __future__ import annotations

from dataclasses import replace

from tests.fakes.tell import Said, incident

from vllm_watchdog.app.recall import recalled
from vllm_watchdog.core.memory import Memory
from vllm_watchdog.tell.history import HistoryError


class Rows:
    def __init__(self, *found):
        self.found = found

    def open_incidents(self):
        if not self.found:
            raise HistoryError("history.db: malformed")
        return self.found


MINE, OTHER = incident(1), replace(incident(2), service="backup")


def test_an_open_incident_that_the_state_does_not_know_is_taken_over():
    said = Said()
    memory = Memory("boot", incidents=(MINE,))
    found = recalled(memory, Rows(MINE, OTHER), said)
    assert found == replace(memory, incidents=(MINE, OTHER))
    assert said.lines == [("incident.recalled", {"incident": OTHER.id})]


def test_the_states_own_incident_of_a_service_stays():
    newer = replace(MINE, id="newer")
    memory = Memory("boot", incidents=(newer,))
    assert recalled(memory, Rows(MINE), Said()) is memory


def test_of_two_of_one_service_the_newest_is_taken_over():
    assert recalled(Memory("boot"), Rows(MINE, replace(MINE, id="newer")), Said()).incidents[0].id == "newer"


def test_without_a_state_the_wall_clock_dates_it():
    assert recalled(None, Rows(MINE), Said()) == Memory(boot_id="", incidents=(MINE,))


def test_a_history_that_cannot_be_read_costs_nothing_else():
    said, memory = Said(), Memory("boot")
    assert recalled(memory, Rows(), said) is memory and recalled(None, Rows(), said) is None
    assert [name for name, _ in said.lines] == ["history.unreadable"] * 2
