from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.fakes.tell import WALL, Clock, Said, incident

from vllm_watchdog.core.schema import CODEC
from vllm_watchdog.tell import history
from vllm_watchdog.tell.history import History, HistoryError, Reader


@pytest.fixture
def said():
    return Said()


@pytest.fixture
def book(tmp_path, said):
    made = History(tmp_path / "logs" / "history.db", Clock(), lambda: WALL, said)
    made.start()
    yield made
    assert made.stop(5)


def test_an_incident_is_read_while_the_daemon_writes_and_after_it_left(book):
    book.record(incident(1))
    book.record(incident(2))
    book.record(incident(1, over=True))
    assert book.flush(5)
    reader = Reader(book.path)
    for _ in range(2):
        rows = reader.incidents()
        assert [row["id"] for row in rows] == [incident(2).id, incident(1).id]
        assert [row["wall_resolved"] for row in rows] == [None, WALL + 30]
        found = reader.incident(incident(1).id)
        assert CODEC.decode(found.pop("incident")) == incident(1, over=True)
        assert found == rows[1] and found["class"] == "oom_runtime" and found["urgency"] == "critical"
        book.stop(5)


def test_who_asks_the_daemon_is_told_what_it_has_only_just_recorded(tmp_path, said, monkeypatch):
    monkeypatch.setattr(history, "answer_s", 30.0)      # of a slow disk
    giving_way = threading.Event()
    book = History(tmp_path / "history.db", Clock(), lambda: WALL, said, give_way=lambda: giving_way.wait(0.05))
    book.start()
    try:
        book.record(incident(1))
        assert [row["urgency"] for row in book.reader().incidents()] == ["critical"]
        assert book.waiting == 0
    finally:
        assert book.stop(5)


def test_who_asks_waits_for_a_hung_disk_no_longer_than_that(tmp_path, said, monkeypatch):
    monkeypatch.setattr(history, "answer_s", 0.01)
    disk = threading.Event()
    book = History(tmp_path / "history.db", Clock(), lambda: WALL, said, give_way=lambda: disk.wait(30))
    book.start()
    try:
        book.record(incident(1))
        began = time.monotonic()
        assert book.reader().incidents() == [] and book.waiting == 1
        assert time.monotonic() - began < 10
    finally:
        disk.set()
        assert book.stop(5)


def test_a_reader_makes_nothing_and_finds_nothing_before_the_first_start(tmp_path):
    reader = Reader(tmp_path / "history.db")
    assert reader.incidents() == [] and reader.incident("x") is None and reader.samples("7d", WALL)["series"] == {}
    assert list(tmp_path.iterdir()) == []


def test_a_reader_cannot_write(book):
    book.record(incident())
    assert book.flush(5)
    with pytest.raises(HistoryError, match="readonly"):
        Reader(book.path)._rows("DELETE FROM incidents")


def test_the_beginning_of_an_id_is_enough_unless_two_begin_so(book):
    book.record(incident(1))
    book.record(incident(2))
    assert book.flush(5)
    reader = Reader(book.path)
    assert reader.incident(incident(1).id[:16])["id"] == incident(1).id
    assert reader.incident("2026") is None
    assert reader.incident("") is None and reader.incident("%") is None


def test_files_are_the_owners_alone(book):
    book.record(incident())
    assert book.flush(5)
    modes = {path.name: path.stat().st_mode & 0o777 for path in book.path.parent.iterdir()}
    assert modes == {"history.db": 0o600, "history.db-wal": 0o600, "history.db-shm": 0o600}


def test_samples_of_before_this_version_are_dropped_and_the_incidents_kept(tmp_path, said):
    path = tmp_path / "history.db"
    first = History(path, Clock(), lambda: WALL, said)
    first.start()
    first.record(incident())
    assert first.stop(5)
    db = sqlite3.connect(path)
    db.executescript("DROP TABLE samples; CREATE TABLE samples (slot, engine); PRAGMA user_version = 1;")
    db.close()
    book = History(path, Clock(), lambda: WALL, said)
    book.start()
    book.do(lambda db: db.execute("INSERT INTO samples VALUES ('6h', 'gpu/0', ?, '{}')", (int(WALL // 10),)))
    assert book.stop(5) and not said.lines
    assert Reader(path).samples("6h", WALL)["series"] == {"gpu/0": {"t": [WALL]}}
    assert Reader(path).incident(incident().id)


@pytest.mark.parametrize("damage", [b"this is no database at all" * 100, None])
def test_a_corrupt_file_is_set_aside_and_said_and_the_next_incident_is_kept(tmp_path, said, damage):
    path = tmp_path / "history.db"
    if damage is None:
        db = sqlite3.connect(path)
        db.executescript("CREATE TABLE t (x); " + "INSERT INTO t VALUES (hex(randomblob(2000)));" * 20)
        db.close()
        data = bytearray(path.read_bytes())
        data[4096:8192] = b"\xff" * 4096
        damage = bytes(data)
    path.write_bytes(damage)
    book = History(path, Clock(), lambda: WALL, said)
    book.start()
    book.record(incident())
    assert book.stop(5)
    (line,) = said.of("file.set_aside")
    assert line["aside"] == f"{path}.corrupt-20261129T215320Z"
    assert (tmp_path / "history.db.corrupt-20261129T215320Z").read_bytes() == damage
    assert [row["id"] for row in Reader(path).incidents()] == [incident().id]


def test_a_disk_that_refuses_is_said_once_a_minute_and_loses_no_incident(tmp_path, said, monkeypatch):
    monkeypatch.setattr(history, "retry_s", 0.01)
    folder = tmp_path / "logs"
    folder.write_text("in the way")
    book = History(folder / "history.db", Clock(), lambda: WALL, said)
    book.start()
    for number in range(3):
        book.record(incident(number))
    said.wait("history.failed")
    assert book.ask(lambda db: 1, 5) is None        # at once: whoever waits is told
    assert not book.flush(5)
    folder.unlink()
    book.record(incident(4))
    assert book.stop(5)
    assert len(said.of("history.failed")) == 1 and book.lost == 0
    assert [row["id"] for row in Reader(book.path).incidents()] == [incident(n).id for n in (4, 2, 1, 0)]


def test_what_is_kept_for_a_full_disk_has_a_limit_and_the_newest_stay(tmp_path, said):
    (tmp_path / "logs").write_text("in the way")
    book = History(tmp_path / "logs" / "history.db", Clock(), lambda: WALL, said, queue_jobs=2)
    for number in range(2):
        book.record(incident(number))
    book.start()
    said.wait("history.failed")
    book.record(incident(3))
    assert not book.stop(5)
    assert book.lost == 1 and len(book._kept) == 2


def test_a_human_who_locks_the_file_costs_nothing_but_time(book, said, monkeypatch):
    book.record(incident(1))
    assert book.flush(5)
    monkeypatch.setattr(history, "retry_s", 0.01)
    monkeypatch.setattr(history, "busy_s", 0.05)
    book._connection.execute("PRAGMA busy_timeout = 10")
    human = sqlite3.connect(book.path, isolation_level=None)
    human.execute("BEGIN IMMEDIATE")
    book.record(incident(2))
    assert said.wait("history.failed")[0]["why"] == "database is locked"
    human.rollback()
    human.close()
    assert book.ask(lambda db: True, 5) or book.ask(lambda db: True, 5)
    assert len(Reader(book.path).incidents()) == 2


def test_a_file_removed_under_the_daemon_is_begun_again(book):
    book.record(incident(1))
    assert book.flush(5)
    for path in book.path.parent.iterdir():
        path.unlink()
    book.record(incident(2))
    assert book.flush(5)
    assert [row["id"] for row in Reader(book.path).incidents()] == [incident(2).id]


def test_a_file_that_goes_bad_while_the_daemon_runs_is_set_aside(book, said):
    book.record(incident(1))
    assert book.flush(5)

    def bad(db):
        if not said.of("file.set_aside"):
            raise sqlite3.DatabaseError("database disk image is malformed")

    book.do(bad)
    book.record(incident(2))
    assert book.flush(5)
    assert len(said.of("file.set_aside")) == 1
    assert [row["id"] for row in Reader(book.path).incidents()] == [incident(2).id]


def test_a_hung_disk_costs_an_asker_its_deadline_and_the_loop_nothing(book):
    held, go = threading.Event(), threading.Event()

    def hang(db):
        held.set()
        go.wait(10)

    book.do(hang)
    assert held.wait(5)
    book.record(incident())
    assert book.ask(lambda db: 1, 0.05) is None
    go.set()
    assert book.ask(lambda db: 2, 5) == 2


def test_an_incident_survives_a_daemon_killed_with_its_wal_unfolded(tmp_path):
    path = tmp_path / "history.db"
    script = (
        "import sys, time\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from tests.fakes.tell import Said, incident\n"
        "from vllm_watchdog.tell.history import History\n"
        "book = History(Path(sys.argv[1]), time.monotonic, time.time, Said())\n"
        "book.start(); book.record(incident()); assert book.flush(10)\n"
        "print('written', flush=True); sys.stdin.read()\n"
    )
    root = str(Path(__file__).parents[2])
    child = subprocess.Popen([sys.executable, "-c", script, str(path), root],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout.readline() == b"written\n"
        child.send_signal(signal.SIGKILL)
    assert (tmp_path / "history.db-wal").stat().st_size > 0
    assert [row["id"] for row in Reader(path).incidents()] == [incident().id]


def test_a_file_that_is_no_history_is_one_sentence_to_a_reader(tmp_path):
    path = tmp_path / "history.db"
    path.write_text("no database" * 1000)
    with pytest.raises(HistoryError, match=r"history\.db: file is not a database, expected the history"):
        Reader(path).incidents()


def test_a_history_that_cannot_be_looked_at_is_one_sentence_to_a_reader(tmp_path):
    (tmp_path / "logs").write_text("a file: root could look into any folder")
    with pytest.raises(HistoryError, match=r"history\.db: Not a directory, expected the history"):
        Reader(tmp_path / "logs" / "history.db").incidents()


def kept(path: Path, **limits: object) -> list[str]:
    """Ids that are left after a pruning, the newest first: five incidents a day apart, the second oldest still open."""
    db = history._open(path)
    with db:
        for number in range(5):
            db.execute("INSERT INTO incidents VALUES (?, '', '', '', '', ?, ?, ?)",
                       (str(number), number * 86_400.0, None if number == 1 else number * 86_400.0 + 60, "x" * 1000))
        history._prune(db, 5 * 86_400.0, float(limits.pop("keep_s", 1e9)))  # type: ignore[arg-type]
    rows = [row[0] for row in db.execute("SELECT id FROM incidents ORDER BY wall_opened DESC")]
    db.close()
    return rows


def test_incidents_that_are_over_leave_by_age(tmp_path):
    assert kept(tmp_path / "a.db", keep_s=2.5 * 86_400) == ["4", "3", "1"]


def test_incidents_that_are_over_leave_by_size_and_by_number(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "incidents_bytes", 2500)
    assert kept(tmp_path / "a.db") == ["4", "3", "1"]
    monkeypatch.setattr(history, "incidents_bytes", 1 << 20)
    monkeypatch.setattr(history, "keep_incidents", 3)
    assert kept(tmp_path / "b.db") == ["4", "3", "2", "1"]


def test_the_open_incidents_are_found_and_one_that_cannot_be_read_is_left_out(book):
    for number in (1, 2, 3):
        book.record(incident(number))
    book.record(incident(1, over=True))
    book.do(lambda db: db.execute("UPDATE incidents SET json = '{\"_\": \"Incident\"}' WHERE id = ?", (incident(3).id,)))
    assert book.flush(5)
    assert Reader(book.path).open_incidents() == (incident(2),)
    assert Reader(book.path.with_name("none.db")).open_incidents() == ()


def test_what_sqlite_keeps_of_the_file_is_little(book):
    """Its own limit of 2,000 KiB is reached within hours, and looks like a leak until then."""
    assert book.ask(lambda db: db.execute("PRAGMA cache_size").fetchone(), 5) == (-history.cache_kib,)
