from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.house import QUICK, WRITER, House, Receiver
from tests.fakes.tell import WALL, Clock, Said, incident

from vllm_watchdog.core.commands import Alert
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.tell import history as history_module
from vllm_watchdog.tell import ledger as ledger_module
from vllm_watchdog.tell import outbox as outbox_module
from vllm_watchdog.tell.channel import Outcome
from vllm_watchdog.tell.desk import ChannelState, Patience
from vllm_watchdog.tell.history import History
from vllm_watchdog.tell.journal import Journal
from vllm_watchdog.tell.ledger import Ledger
from vllm_watchdog.tell.manners import Hours, Manners
from vllm_watchdog.tell.outbox import Outbox
from vllm_watchdog.tell.store import Store


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.db"


def test_each_alert_is_told_once_on_each_channel(path):
    first, second = Receiver("oncall"), Receiver("team")
    house = House(path, first, second)
    for _ in range(3):
        house.box.tell(Alert("opened", incident()))
    house.box.tell(Alert("resolved", incident(over=True)))
    house.said.wait("alert.delivered", 4)
    assert house.stop()
    assert [first.kinds(2), second.kinds(2)] == [["opened", "resolved"]] * 2
    assert first.got.empty() and second.got.empty()


def test_an_incident_that_worsens_twice_is_told_twice(path):
    receiver = Receiver()
    house = House(path, receiver)
    for urgency in (Urgency.CRITICAL, Urgency.PAGE, Urgency.PAGE):
        house.box.tell(Alert("worsened", incident(urgency=urgency)))
    house.said.wait("alert.delivered", 2)
    assert house.stop()
    assert [receiver.got.get_nowait()["urgency"] for _ in range(2)] == ["critical", "page"] and receiver.got.empty()


def test_what_was_confirmed_is_not_told_again_by_the_next_daemon(path):
    for number in (1, 2):
        receiver = Receiver()
        house = House(path, receiver)
        house.box.tell(Alert("opened", incident(1)))
        house.box.tell(Alert("opened", incident(2)))
        house.box.tell(Alert("resolved", incident(number, over=True)))
        house.said.wait("alert.delivered", 3 if number == 1 else 1)
        assert house.stop()
    assert receiver.kinds(1) == ["resolved"] and receiver.got.empty()


def test_when_a_channel_last_took_an_alert_is_known_to_the_next_daemon(path):
    house = House(path, Receiver("oncall", *[Outcome(False, "HTTP 503")] * 1000))
    house.box.tell(Alert("opened", incident(1)))
    house.said.wait("alert.failed")
    assert house.stop()
    house = House(path, Receiver("oncall"), wall=WALL + 5)     # told at WALL, taken now
    house.said.wait("alert.delivered")
    assert house.stop()
    house = House(path, Receiver("oncall"), Receiver("new"), wall=WALL + 60)
    deadline = time.monotonic() + 10
    while house.box.states()[0].delivered_wall is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [state.delivered_wall for state in house.box.states()] == [WALL + 5, None]
    house.box.tell(Alert("opened", incident(2)))
    house.said.wait("alert.delivered", 2)
    assert [state.delivered_wall for state in house.box.states()] == [WALL + 60] * 2
    assert house.stop()


def test_an_alert_is_on_disk_before_anyone_tries_to_send_it(path):
    receiver = Receiver()
    receiver.go.clear()
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident()))
    payload = receiver.got.get(timeout=5)
    rows = house.history.ask(lambda db: db.execute("SELECT incident, kind, payload, done FROM outbox").fetchall(), 5)
    assert rows == [(incident().id, "opened", json.dumps(payload), None)]
    receiver.go.set()
    assert house.stop()


def test_what_a_daemon_could_not_deliver_goes_out_from_the_next_in_order(path):
    down = Receiver("oncall", *[Outcome(False, "HTTP 503")] * 1000)
    house = House(path, down)
    house.box.tell(Alert("opened", incident()))
    house.said.wait("alert.failed", 2)
    house.box.tell(Alert("resolved", incident(over=True)))
    assert house.stop()
    up = Receiver("oncall")
    house = House(path, up, wall=WALL + 60)
    assert up.kinds(2) == ["opened", "resolved"]
    assert house.said.wait("alert.delivered", 2)[0]["tries"] >= 3
    assert house.stop()


@pytest.mark.parametrize(("spoil", "why"), [
    (lambda payload: "{", "all of it: Invalid JSON: EOF while parsing an object at line 1 column 1"),
    (lambda payload: "[1]", "all of it: Input should be an object"),
    (lambda payload: None, "all of it: JSON input should be string, bytes or bytearray"),
    (lambda payload: json.dumps(payload | {"urgency": "dire"}), "urgency: Input should be 'warning', 'critical' or 'page'"),
    (lambda payload: json.dumps(payload | {"title": "GPU"}), "title: Input should be an object"),
    (lambda payload: json.dumps(payload | {"lines": [["Cause"]]}), "lines.0.1: Field required"),
    (lambda payload: json.dumps(payload | {"class": None}), "class: Input should be a valid string"),
    (lambda payload: json.dumps({"version": 2, "text": "all is lost"}), "id: Field required"),
])
def test_what_no_version_of_ours_wrote_is_closed_with_a_reason_and_said_once(path, spoil, why):
    leave(path, spoil)
    receiver = Receiver()
    house = House(path, receiver)
    (line,) = house.said.wait("alert.given_up")
    assert line["incident"] == incident(1).id and line["channel"] == "oncall"
    assert line["why"] == f"what another version of the watchdog wrote can't be read: {why}"
    assert receiver.got.get(timeout=5)["incident"] == incident(2).id    # the others are told
    house.said.wait("alert.delivered")
    assert house.stop() and receiver.got.empty()
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident(3)))
    house.said.wait("alert.delivered")
    assert house.stop() and house.said.of("alert.given_up") == []


def test_a_payload_of_a_later_version_that_holds_what_is_needed_is_told(path):
    leave(path, lambda payload: json.dumps(payload | {"version": 2, "mood": "calm"}))
    receiver = Receiver()
    house = House(path, receiver)
    assert receiver.got.get(timeout=5)["mood"] == "calm"
    house.said.wait("alert.delivered", 2)
    assert house.stop() and house.said.of("alert.given_up") == []


def leave(path, spoil):
    """What another daemon could not deliver: of two alerts the first is as `spoil` makes it."""
    house = House(path, Receiver("oncall", *[Outcome(False, "HTTP 503")] * 1000))
    for number in (1, 2):
        house.box.tell(Alert("opened", incident(number)))
    house.said.wait("alert.failed", 2)
    payload = spoil(WRITER.payload(Alert("opened", incident(1)), WALL))
    assert house.history.ask(lambda db: db.execute(
        "UPDATE outbox SET payload = ? WHERE incident = ?", (payload, incident(1).id)).rowcount, 5) == 1
    assert house.stop()


def test_a_history_that_is_slow_to_open_does_not_hide_what_is_owed(path, monkeypatch):
    monkeypatch.setattr(ledger_module, "patience_s", 0.05)
    monkeypatch.setattr(outbox_module, "retry_s", 0.01)
    house = House(path, Receiver("oncall", *[Outcome(False, "HTTP 503")] * 1000))
    house.box.tell(Alert("opened", incident(1)))
    house.said.wait("alert.failed")
    assert house.stop()
    opened = threading.Event()
    real = history_module._open
    monkeypatch.setattr(history_module, "_open", lambda path: opened.wait(10) and real(path))
    receiver = Receiver()
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident(2)))        # told although the file is not open yet
    assert receiver.got.get(timeout=5)["incident"] == incident(2).id
    opened.set()
    assert receiver.got.get(timeout=5)["incident"] == incident(1).id
    house.said.wait("alert.delivered", 2)
    assert house.stop() and receiver.got.empty()


def test_resolved_never_overtakes_opened(path):
    receiver = Receiver("oncall", Outcome(False, "HTTP 500"), Outcome(False, "HTTP 500"))
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident()))
    house.box.tell(Alert("resolved", incident(over=True)))
    assert receiver.kinds(4) == ["opened", "opened", "opened", "resolved"]
    house.said.wait("alert.delivered", 2)
    assert house.stop()


def test_a_hung_receiver_delays_no_other_channel_and_no_stop(path):
    hung, well = Receiver("hung"), Receiver("well")
    hung.go.clear()
    house = House(path, hung, well)
    house.box.tell(Alert("opened", incident(1)))
    house.box.tell(Alert("opened", incident(2)))
    house.said.wait("alert.delivered", 2)
    hung.kinds(1)       # it is being asked, so there is something that hangs
    began = time.monotonic()
    assert not house.stop(0.1)
    assert time.monotonic() - began < 2
    assert [(state.name, state.waiting) for state in house.box.states()] == [("hung", 2), ("well", 0)]
    hung.go.set()


def test_it_gives_up_out_loud_and_for_good(path):
    down = Receiver("oncall", *[Outcome(False, "HTTP 503")] * 1000)
    house = House(path, down, patience=replace(QUICK, give_up_s=0.1))
    house.box.tell(Alert("opened", incident()))
    (line,) = house.said.wait("alert.given_up")
    assert line["why"] == "HTTP 503" and line["tries"] > 1 and line["channel"] == "oncall"
    assert house.box.states() == (ChannelState("oncall", 0, None, "HTTP 503", WALL),)
    assert house.stop()
    up = Receiver("oncall")
    house = House(path, up)
    house.box.tell(Alert("opened", incident()))
    house.box.tell(Alert("opened", incident(2)))
    house.said.wait("alert.delivered")
    assert house.stop()
    assert up.got.get_nowait()["incident"] == incident(2).id and up.got.empty()


def test_a_day_spent_without_a_daemon_counts_towards_giving_up(path):
    house = House(path, Receiver("oncall", *[Outcome(False, "HTTP 503")] * 1000))
    house.box.tell(Alert("opened", incident()))
    house.said.wait("alert.failed")
    assert house.stop()
    house = House(path, Receiver("oncall", Outcome(False, "HTTP 503")), wall=WALL + 86_401)
    house.said.wait("alert.given_up")       # one try, and no more
    assert house.stop()


def test_a_disk_that_takes_nothing_does_not_keep_an_alert_from_being_told_once(tmp_path):
    folder = tmp_path / "logs"
    folder.write_text("in the way")
    receiver = Receiver()
    house = House(folder / "history.db", receiver)
    house.box.tell(Alert("opened", incident()))
    house.said.wait("alert.delivered")
    house.box.tell(Alert("opened", incident()))
    house.box.tell(Alert("opened", incident(2)))
    house.said.wait("alert.delivered", 2)
    folder.unlink()         # the stop writes down what was confirmed
    assert house.stop()
    assert receiver.kinds(2) == ["opened", "opened"] and receiver.got.empty()
    house = House(folder / "history.db", receiver)     # confirmed late, but confirmed
    house.box.tell(Alert("opened", incident()))
    house.box.tell(Alert("opened", incident(3)))
    house.said.wait("alert.delivered")
    assert house.stop()
    assert receiver.got.get_nowait()["incident"] == incident(3).id and receiver.got.empty()


def test_a_daemon_that_could_not_begin_may_stop_what_it_never_started(tmp_path):
    said, clock = Said(), Clock()
    history = History(tmp_path / "history.db", clock, clock, said)
    parts = (history, Outbox((Receiver(),), Ledger(history), WRITER, clock, clock, said),
             Journal(tmp_path, clock, clock), Store(tmp_path / "memory.json", clock, said))
    assert all(part.stop(0.1) for part in parts)
    assert list(tmp_path.iterdir()) == []


@given(st.integers(1, 500), st.floats(0, 1), st.none() | st.floats(0, 1e6))
def test_delays_grow_stay_bounded_and_honour_the_receiver(attempts, chance, asked_s):
    patience = Patience()
    delay_s = patience.delay_s(attempts, chance, asked_s)
    assert min(patience.most_s, 2.0 * 2 ** (attempts - 1)) / 2 <= delay_s or asked_s
    assert delay_s <= max(patience.most_s, patience.asked_most_s)
    assert delay_s >= min(asked_s or 0, patience.asked_most_s)
    assert patience.delay_s(attempts + 1, chance, asked_s) >= delay_s


# -- manners, at a real desk; what they choose is in test_manners.py

def test_people_hear_of_a_storm_in_one_message_and_of_each_incident_in_it(path):
    receiver = Receiver(manners=Manners(together=True, gather_s=0.2))
    house = House(path, receiver)
    for number in range(1, 8):
        house.box.tell(Alert("opened", incident(number)))
    house.said.wait("alert.delivered", 7)
    assert house.stop()
    message = receiver.got.get_nowait()
    assert receiver.got.empty() and message["kind"] == "group" and message["count"] == 7
    assert {each["incident"] for each in message["alerts"]} == {incident(number).id for number in range(1, 8)}
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident(8)))
    assert receiver.kinds(1) == ["opened"]      # what went in company is not owed any more
    house.said.wait("alert.delivered")
    assert house.stop() and receiver.got.empty()


def test_what_opened_and_ended_while_the_channel_was_down_is_one_message(path):
    receiver = Receiver("oncall", Outcome(False, "HTTP 503"), manners=Manners(together=True, gather_s=0.01))
    receiver.go.clear()
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident()))
    assert receiver.kinds(1) == ["opened"]
    house.box.tell(Alert("resolved", incident(over=True)))
    assert eventually(lambda: house.box.states()[0].waiting == 2)
    receiver.go.set()
    house.said.wait("alert.delivered", 2)
    assert receiver.kinds(1) == ["resolved"] and receiver.got.empty()
    assert house.stop()


def test_what_is_over_the_hours_limit_waits_and_then_goes_as_one_but_a_page_does_not_wait(path):
    receiver = Receiver(manners=Manners(together=True, gather_s=0.0, most_per_hour=2))
    house = House(path, receiver)
    for number in (1, 2):
        house.box.tell(Alert("opened", incident(number)))
        house.said.wait("alert.delivered", number)
    for number in (3, 4):
        house.box.tell(Alert("opened", incident(number)))
    assert eventually(lambda: house.box.states()[0].waiting == 2)
    assert receiver.kinds(2) == ["opened"] * 2 and receiver.got.empty()
    house.box.tell(Alert("opened", incident(5, urgency=Urgency.PAGE)))
    message = receiver.got.get(timeout=5)
    assert message["kind"] == "group" and message["count"] == 3 and message["urgency"] == "page"
    assert house.stop()


def test_a_channel_hears_of_nothing_below_its_severity(path):
    receiver = Receiver(manners=Manners(least=Urgency.CRITICAL))
    house = House(path, receiver)
    mild = incident(1, urgency=Urgency.WARNING)
    house.box.tell(Alert("opened", mild))
    house.box.tell(Alert("resolved", incident(1, urgency=Urgency.WARNING, over=True)))
    house.box.tell(Alert("opened", incident(2, urgency=Urgency.WARNING)))
    house.box.tell(Alert("worsened", incident(2)))
    house.box.tell(Alert("resolved", incident(2, over=True)))
    house.said.wait("alert.delivered", 2)
    assert receiver.kinds(2) == ["worsened", "resolved"] and receiver.got.empty()
    assert house.stop()


def test_a_warning_that_opened_and_ended_at_night_is_not_told_not_even_by_the_next_daemon(path):
    night = Manners(quiet=Hours(0, 24 * 60 - 1), together=True, gather_s=0.0)
    if time.localtime(WALL).tm_hour == 23 and time.localtime(WALL).tm_min == 59:
        pytest.skip("the one minute that is not night")
    receiver = Receiver(manners=night)
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident(1, urgency=Urgency.WARNING)))
    house.box.tell(Alert("resolved", incident(1, urgency=Urgency.WARNING, over=True)))
    house.box.tell(Alert("opened", incident(2, urgency=Urgency.WARNING)))
    house.box.tell(Alert("opened", incident(3)))            # critical: at once
    assert receiver.got.get(timeout=5)["incident"] == incident(3).id
    assert eventually(lambda: house.box.states()[0].waiting == 1)
    assert house.stop()
    receiver.manners = Manners()                            # the morning
    house = House(path, receiver)
    assert receiver.got.get(timeout=5)["incident"] == incident(2).id
    house.said.wait("alert.delivered")
    assert house.stop() and receiver.got.empty()


def test_a_receiver_that_asks_for_time_gets_it_from_the_whole_channel(path):
    receiver = Receiver("oncall", Outcome(False, "HTTP 429", 0.3))
    house = House(path, receiver)
    began = time.monotonic()
    house.box.tell(Alert("opened", incident(1)))
    house.said.wait("alert.failed")
    house.box.tell(Alert("opened", incident(2)))
    receiver.kinds(2)
    assert time.monotonic() - began >= 0.3
    house.said.wait("alert.delivered", 2)
    assert house.stop()


def test_one_message_that_a_receiver_refuses_keeps_no_other_from_going(path):
    class Picky(Receiver):
        def send(self, payload):
            self.got.put(payload)
            bad = incident(2).id in json.dumps(payload)
            return Outcome(False, "HTTP 400", refused=True) if bad else Outcome(True, "HTTP 200")

    receiver = Picky(manners=Manners(together=True, gather_s=0.2))
    house = House(path, receiver)
    for number in (1, 2, 3):
        house.box.tell(Alert("opened", incident(number)))
    told = {line["incident"] for line in house.said.wait("alert.delivered", 2)}
    assert told == {incident(1).id, incident(3).id} and house.box.states()[0].waiting == 1
    assert house.stop()


def test_an_address_that_can_never_work_is_told_at_the_start_and_not_at_the_first_alert(path):
    class Nowhere(Receiver):
        def unusable(self):
            return "Apprise does not know this address"

    house = House(path, Nowhere())
    assert house.said.wait("alert.unusable") == [{"channel": "oncall", "why": "Apprise does not know this address"}]
    assert eventually(lambda: house.box.states()[0].failing == "Apprise does not know this address")
    assert house.stop()


def test_status_says_since_when_a_channel_fails(path):
    receiver = Receiver("oncall", Outcome(False, "HTTP 503"), Outcome(False, "HTTP 502"))
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident()))
    house.said.wait("alert.failed", 2)
    state = house.box.states()[0]
    assert (state.failing_since_wall, state.delivered_wall) in ((WALL, None), (None, WALL))
    house.said.wait("alert.delivered")
    assert eventually(lambda: house.box.states()[0] == ChannelState("oncall", 0, WALL, "", None))
    assert house.stop()


def eventually(true, within_s=10.0):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if true():
            return True
        threading.Event().wait(0.005)
    return False
